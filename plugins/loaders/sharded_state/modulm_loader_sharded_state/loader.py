"""Checkpoints of which each rank reads files of its own, written by `modulm save-sharded`.

They hold parameters as the model has them when a checkpoint is in place, before anything is
repacked: by the model's names, this rank's piece of each. Files are called as vLLM's; what is in
them is ours, since names and layers' fusing are a runtime's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from modulm.contracts.loader import StoredTensor
from modulm.errors import CheckpointError
from modulm.parallel import Mesh
from modulm.plugins.options import structure
from modulm_tensor_files import RANK_PATTERN, SafetensorsFolder, rank_files, unfit_pattern

__all__ = ["ShardedStateConfig", "ShardedStateLoader"]


@frozen
class ShardedStateConfig:
    """`pattern`: names of files, with `{rank}`, `{part}` and perhaps `{ranks}`, their number."""

    pattern: str = field(default=RANK_PATTERN)

    @pattern.validator
    def _whole(self, attribute: object, value: str) -> None:
        reason = unfit_pattern(value)
        if reason is not None:
            raise ValueError(reason)


class ShardedStateLoader(SafetensorsFolder):
    """This rank's files; chosen by name, or where a folder has nothing but such files."""

    name = "sharded_state"
    api = 1
    Config = ShardedStateConfig

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        super().__init__(path)
        self.config = structure(options or {}, ShardedStateConfig, "model_loader_extra_config")

    @classmethod
    def opens(cls, path: Path) -> str | None:
        first = rank_files(RANK_PATTERN, 0, 1)
        names = [file.name for file in path.glob("*.safetensors")] if path.is_dir() else []
        return "there is a file for each rank" if any(map(first.fullmatch, names)) else None

    def files(self) -> list[str]:
        group = Mesh().tensor
        expression = rank_files(self.config.pattern, group.rank, group.size)
        found = {}
        for file in self.path.glob("*.safetensors"):
            match = expression.fullmatch(file.name)
            if match is not None:
                found[int(match[1])] = file.name
        if sorted(found) != list(range(len(found))) or not found:
            shown = self.config.pattern.replace("{rank}", str(group.rank))
            have = ", ".join(found[part] for part in sorted(found)) or "none"
            raise CheckpointError(
                f"{self.path}: parts 0 to the last of {shown} are needed, there are: {have}"
            )
        return [found[part] for part in sorted(found)]

    def expect(self, tensors: Mapping[str, StoredTensor]) -> bool:
        return True
