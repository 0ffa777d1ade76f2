"""OpenAI's API: models, completions and chat completions, with vLLM's additional fields."""

from modulm_route_openai.family import OpenAI

__all__ = ["OpenAI"]
