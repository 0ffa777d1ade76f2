"""Ranks that share a layer. One rank is the ordinary case and a full object, never None."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Group", "Mesh"]


@frozen
class Group:
    """A group of `size` ranks, of which this process is number `rank`.

    The methods are what layers call; alone, each returns its input. A group of several ranks is
    a subclass with real collectives.
    """

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        self._alone()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors side by side along the last dimension, on each of them."""
        self._alone()
        return x

    def part(self, total: int, what: str) -> int:
        """This rank's share of `total`. Raises UnsupportedError if it cannot be cut evenly."""
        if total % self.size:
            raise UnsupportedError(f"{what}: {total} cannot be cut for {self.size} ranks")
        return total // self.size

    def _alone(self) -> None:
        if self.size > 1:
            raise UnsupportedError(f"collectives between {self.size} ranks: not yet")


@frozen
class Mesh:
    """The groups of this process, by what they share."""

    tensor: Group = field(factory=Group)
