"""OpenAI's files and batches: jobs of many requests, done by this server itself."""

from modulm_route_files.family import Files

__all__ = ["Files"]
