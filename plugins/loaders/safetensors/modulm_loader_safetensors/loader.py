"""Safetensors checkpoints: model.safetensors, shards with an index, or other files."""

from __future__ import annotations

from pathlib import Path

from modulm_tensor_files import RANK_PATTERN, SafetensorsFolder, rank_files

__all__ = ["SafetensorsLoader"]


class SafetensorsLoader(SafetensorsFolder):
    """The format in which most checkpoints are published."""

    name = "safetensors"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        if not path.is_dir():
            return None
        names = {file.name for file in path.glob("*.safetensors*")}
        weight_files = [n for n in names if n == cls.INDEX or n.endswith(".safetensors")]
        of_ranks = rank_files(RANK_PATTERN, 0, 1)
        if not weight_files or all(of_ranks.fullmatch(name) for name in weight_files):
            return None
        return "found *.safetensors files"
