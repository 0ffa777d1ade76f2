"""llama.cpp's API, for clients of its server."""

from __future__ import annotations

from modulm_route_llama_cpp.family import LlamaCpp

__all__ = ["LlamaCpp"]
