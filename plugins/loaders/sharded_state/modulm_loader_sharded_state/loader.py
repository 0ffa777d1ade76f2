"""Checkpoints with separate files for each rank, written by `modulm save-sharded`.

They hold each rank's shards of the parameters under the model's own names, before any repacking.
File names follow vLLM; the contents do not, because names and fused layers are specific to a
runtime.
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
    """`pattern`: file names with `{rank}`, `{part}` and optionally `{ranks}`, the rank count."""

    pattern: str = field(default=RANK_PATTERN)

    @pattern.validator
    def _whole(self, attribute: object, value: str) -> None:
        reason = unfit_pattern(value)
        if reason is not None:
            raise ValueError(reason)


class ShardedStateLoader(SafetensorsFolder):
    """This rank's files. Selected by name, or if a folder holds only such files."""

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
        return "found one file per rank" if any(map(first.fullmatch, names)) else None

    def files(self) -> list[str]:
        group = Mesh().tensor
        expression = rank_files(self.config.pattern, group.rank, group.size)
        parts = {}
        for file in self.path.glob("*.safetensors"):
            match = expression.fullmatch(file.name)
            if match is not None:
                parts[int(match[1])] = file.name
        if sorted(parts) != list(range(len(parts))) or not parts:
            pattern = self.config.pattern.replace("{rank}", str(group.rank))
            have = ", ".join(parts[part] for part in sorted(parts)) or "none"
            raise CheckpointError(
                f"{self.path}: parts 0 to the last of {pattern} are required, found: {have}"
            )
        return [parts[part] for part in sorted(parts)]

    def expect(self, tensors: Mapping[str, StoredTensor]) -> bool:
        return True
