"""Safetensors: model.safetensors, or shards and their index, or other *.safetensors."""

from __future__ import annotations

from pathlib import Path

from modulm_tensor_files import RANK_PATTERN, SafetensorsFolder, rank_files

__all__ = ["SafetensorsLoader"]


class SafetensorsLoader(SafetensorsFolder):
    """What most checkpoints are published as."""

    name = "safetensors"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        if not path.is_dir():
            return None
        names = {file.name for file in path.glob("*.safetensors*")}
        own = [n for n in names if n == cls.INDEX or n.endswith(".safetensors")]
        of_ranks = rank_files(RANK_PATTERN, 0, 1)
        if not own or all(of_ranks.fullmatch(name) for name in own):
            return None
        return "there are *.safetensors files"
