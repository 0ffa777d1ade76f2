"""PyTorch checkpoints: pytorch_model.bin or its shards. Their code is never executed."""

from __future__ import annotations

from pathlib import Path

from modulm_tensor_files import PickledFolder

__all__ = ["PtLoader"]

#: If one of these is present, the pickles in the folder are leftovers of training.
_BETTER = "*.safetensors*"


class PtLoader(PickledFolder):
    """A folder with pytorch_model.bin, or with shards and their index."""

    name = "pt"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        if not path.is_dir() or any(path.glob(_BETTER)):
            return None
        file = cls.found_in(path)
        return f"found {file} and no safer format" if file else None
