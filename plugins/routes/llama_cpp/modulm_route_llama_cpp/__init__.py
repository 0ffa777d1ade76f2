"""llama.cpp's API: what programs written for its server ask for."""

from __future__ import annotations

from modulm_route_llama_cpp.family import LlamaCpp

__all__ = ["LlamaCpp"]
