"""Weight loader: reads one checkpoint format (group `modulm.loaders`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

__all__ = ["API", "StoredTensor", "WeightLoader"]

API = 1


@frozen
class StoredTensor:
    """A tensor on disk, known from the file's header: nothing of it has been read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    bytes: int


class WeightLoader(ABC):
    """One checkpoint format. All checks of names and shapes happen on the index, before reading."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def opens(cls, path: Path) -> str | None:
        """A reason why this loader is the one for the file or folder `path`, or None."""

    def __init__(self, path: Path, options: Mapping[str, Any] | None = None) -> None:
        self.path = path

    def expect(self, tensors: Mapping[str, StoredTensor]) -> bool:
        """What the model takes, by its own names, told before `index` is asked.

        A format that holds weights has no use for it and returns False. One that makes them up
        returns True: its names are the model's own and are not rewritten.
        """
        return False

    @abstractmethod
    def index(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name. Raises CheckpointError for truncated, missing or doubled ones."""

    @abstractmethod
    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, each read when it is yielded and not kept: peak memory is one tensor."""
