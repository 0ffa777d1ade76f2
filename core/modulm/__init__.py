"""modulm: an LLM inference and serving engine in which every replaceable part is a plugin."""

__version__ = "0.1.0"
