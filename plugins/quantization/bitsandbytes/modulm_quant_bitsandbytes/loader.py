"""`--load-format bitsandbytes`, vLLM's name: safetensors that are quantized while loading.

Checkpoints that the library wrote are plain safetensors and do not need this loader.
"""

from __future__ import annotations

from pathlib import Path

from modulm_tensor_files import SafetensorsFolder

__all__ = ["BitsAndBytesLoader"]


class BitsAndBytesLoader(SafetensorsFolder):
    """Reads the folders of the safetensors loader; selected only by name."""

    name = "bitsandbytes"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        return None
