"""Cohere's chat API: /v2/chat and the older /v1/chat, whole and streamed."""

from modulm_route_cohere.family import Cohere

__all__ = ["Cohere"]
