"""A checkpoint as it was read, and short names for models (group `modulm.checkpoints`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from modulm.contracts.quantization import CheckpointInfo

__all__ = ["API", "Checkpoint", "NamedCheckpoint"]

API = 2


@frozen
class Checkpoint:
    """A model's files, and its JSON tables as read, `--hf-overrides` applied.

    `path` is a folder, or a file that a loader opens; `config_file` is where `config` is from;
    `architecture` is the first name that it gives; which driver runs it is decided when the
    model is loaded.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    architecture: str
    info: CheckpointInfo
    config_file: Path

    @property
    def architectures(self) -> tuple[str, ...]:
        """All names that config.json gives, best first."""
        return tuple(self.config["architectures"])


class NamedCheckpoint(ABC):
    """A model that is served by a short name.

    What its files cannot say, such as the parsers that read its output, its package answers by
    hooks (`modulm_choose_parser`).
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def source(cls) -> Path | str:
        """The folder of the checkpoint, or the hub id to download."""

    @classmethod
    def texts(cls) -> Iterable[str]:
        """Text like what the model was made for: to calibrate and to measure with."""
        return ()
