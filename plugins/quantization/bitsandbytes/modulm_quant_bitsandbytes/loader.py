"""`--load-format bitsandbytes`, as vLLM calls it: safetensors, rounded by this method as they load.

A checkpoint that the library wrote is safetensors too, and needs no loader of its own.
"""

from __future__ import annotations

from pathlib import Path

from modulm_tensor_files import SafetensorsFolder

__all__ = ["BitsAndBytesLoader"]


class BitsAndBytesLoader(SafetensorsFolder):
    """What the safetensors loader reads; chosen by name alone."""

    name = "bitsandbytes"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        return None
