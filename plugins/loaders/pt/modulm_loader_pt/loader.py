"""PyTorch checkpoints: pytorch_model.bin, or shards of it and their index. Nothing of them runs."""

from __future__ import annotations

from pathlib import Path

from modulm_tensor_files import PickledFolder

__all__ = ["PtLoader"]

#: Beside these the pickles of a folder are what training left there.
_BETTER = "*.safetensors*"


class PtLoader(PickledFolder):
    """A folder with pytorch_model.bin, or with shards and their index."""

    name = "pt"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        if not path.is_dir() or any(path.glob(_BETTER)):
            return None
        found = cls.found_in(path)
        return f"there is {found}, and no safer format" if found else None
