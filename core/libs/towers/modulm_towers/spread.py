"""Encoders with whole weights on each of several ranks, which share out the items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.parallel import ProcessGroup
from modulm_towers.pieces import Pieces, whole

__all__ = ["Spread", "owners"]

_Encode: TypeAlias = Callable[[Sequence[MediaItem]], Pieces[Sequence[Tensor]]]


@frozen(eq=False)
class Spread:
    """Ranks of `group`, each of which has whole encoders and is given the same items.

    encode: what makes the embeddings of items here; dtype, device: of what it gives.
    """

    group: ProcessGroup
    encode: _Encode
    dtype: torch.dtype
    device: torch.device

    def at_once(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        """The embeddings of all items, each made by one rank."""
        whose = owners(items, self.group.size)
        mine = self._mine(items, whose)
        return self._gathered(items, whose, whole(self.encode(mine)) if mine else ())

    def run(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        """The same in pieces: every rank stops as often as the one that has most to do, and is told
        the rows of all.
        """
        whose = owners(items, self.group.size)
        mine = self._mine(items, whose)
        pieces, found = self.encode(mine) if mine else None, ()
        while True:
            rows = 0
            if pieces is not None:
                try:
                    rows = next(pieces)
                except StopIteration as end:
                    pieces, found = None, end.value
            of_all = int(self.group.all_reduce(self._number(rows)))
            if not of_all:
                return self._gathered(items, whose, found)
            yield of_all

    def _mine(self, items: Sequence[MediaItem], whose: Sequence[int]) -> list[MediaItem]:
        return [item for item, rank in zip(items, whose, strict=True) if rank == self.group.rank]

    def _gathered(
        self, items: Sequence[MediaItem], whose: Sequence[int], made: Sequence[Tensor]
    ) -> list[Tensor]:
        """Every item's embeddings, from its owner; made: of the items that are this rank's."""
        own, found = iter(made), []
        for item, rank in zip(items, whose, strict=True):
            here = next(own).to(self.dtype) if rank == self.group.rank else None
            width = self.group.broadcast(self._number(0 if here is None else here.shape[1]), rank)
            if here is None:
                shape = (item.length, int(width))
                here = torch.empty(shape, dtype=self.dtype, device=self.device)
            found.append(self.group.broadcast(here, rank))
        return found

    def _number(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self.device)


def owners(items: Sequence[MediaItem], ranks: int) -> list[int]:
    """The rank that encodes each item: the longest first, each to the one that has least."""
    loads, found = [0] * ranks, [0] * len(items)
    for index in sorted(range(len(items)), key=lambda index: -items[index].length):
        rank = loads.index(min(loads))
        found[index] = rank
        loads[rank] += items[index].length
    return found
