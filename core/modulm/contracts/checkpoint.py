"""Named checkpoint: a short name for a model (group `modulm.checkpoints`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["API", "NamedCheckpoint"]

API = 1


class NamedCheckpoint(ABC):
    """A model that is served by a short name, with what its files cannot say."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Parsers that read its output; a flag goes before them.
    tool_parser: ClassVar[str | None] = None
    reasoning_parser: ClassVar[str | None] = None

    @classmethod
    @abstractmethod
    def source(cls) -> Path | str:
        """The folder of the checkpoint, or the hub id to download."""
