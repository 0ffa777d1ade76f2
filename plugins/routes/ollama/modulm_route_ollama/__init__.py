"""Ollama's API: /api/chat, /api/generate, /api/embed and descriptions of models.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from modulm_route_ollama.family import Ollama

__all__ = ["Ollama"]
