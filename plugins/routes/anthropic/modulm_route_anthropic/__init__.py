"""Anthropic's API: /v1/messages with streaming, tools and thinking, and count_tokens."""

from modulm_route_anthropic.family import Anthropic

__all__ = ["Anthropic"]
