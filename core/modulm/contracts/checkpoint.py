"""Checkpoints as read from disk, and short names for models (group `modulm.checkpoints`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from modulm.contracts.quantization import CheckpointInfo

__all__ = ["API", "Checkpoint", "NamedCheckpoint", "WantedFiles"]

API = 2


@frozen
class Checkpoint:
    """A model's files and its JSON configuration, with `--hf-overrides` applied.

    `path` is a folder, or a file that a loader opens. `config_file` is where `config` was read
    from. `architecture` is the first architecture that it lists; which driver runs the model is
    decided on loading.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    architecture: str
    info: CheckpointInfo
    config_file: Path

    @property
    def architectures(self) -> tuple[str, ...]:
        """All architectures that config.json lists, best first."""
        return tuple(self.config["architectures"])


@frozen
class WantedFiles:
    """Which files of a checkpoint to download (hook `modulm_fetch_checkpoint`).

    patterns: of paths below the checkpoint's folder (`fnmatch`). weights: those of weights among
    them. fallback: patterns that are added if that folder has no such weights. choose: for the
    repository and part of `repository:PART` and a list of paths, returns those of the part, the one
    to open first; raises CheckpointError. headers_in: an empty folder. If set, a source may write
    the small files and weight files without their data (sparse) into it, instead of downloading
    weights, and return it.
    """

    patterns: tuple[str, ...]
    weights: tuple[str, ...]
    fallback: tuple[str, ...]
    choose: Callable[[str, str, Sequence[str]], Sequence[str]]
    headers_in: Path | None = None


class NamedCheckpoint(ABC):
    """A model that can be served by a short name.

    Its package provides what the files do not say, such as parsers, through hooks
    (`modulm_choose_parser`).
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def source(cls) -> Path | str:
        """Return the folder of the checkpoint, or the hub id to download."""

    @classmethod
    def texts(cls) -> Iterable[str]:
        """Return sample texts of the model's domain, for calibration and measurements."""
        return ()
