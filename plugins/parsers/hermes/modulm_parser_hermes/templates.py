"""Hermes chat templates: ChatML with tools and calls in tags."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["HERMES"]

_HERE = Path(__file__).parent

HERMES = ChatTemplate(_HERE / "hermes.jinja", tool_parser="hermes")
