"""Encoders replicated on several ranks, which divide the items among them."""

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
    """The ranks of `group`, each with complete encoders and the same items.

    encode: computes the embeddings of items on this rank. dtype, device: of its result.
    """

    group: ProcessGroup
    encode: _Encode
    dtype: torch.dtype
    device: torch.device

    def at_once(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        """The embeddings of all items, each computed by one rank."""
        whose = owners(items, self.group.size)
        mine = self._mine(items, whose)
        return self._gathered(items, whose, whole(self.encode(mine)) if mine else ())

    def run(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        """`at_once` in pieces.

        Every rank pauses as often as the busiest one and yields the row count summed over ranks.
        """
        whose = owners(items, self.group.size)
        mine = self._mine(items, whose)
        pieces, results = self.encode(mine) if mine else None, ()
        while True:
            rows = 0
            if pieces is not None:
                try:
                    rows = next(pieces)
                except StopIteration as end:
                    pieces, results = None, end.value
            of_all = int(self.group.all_reduce(self._number(rows)))
            if not of_all:
                return self._gathered(items, whose, results)
            yield of_all

    def _mine(self, items: Sequence[MediaItem], whose: Sequence[int]) -> list[MediaItem]:
        return [item for item, rank in zip(items, whose, strict=True) if rank == self.group.rank]

    def _gathered(
        self, items: Sequence[MediaItem], whose: Sequence[int], local: Sequence[Tensor]
    ) -> list[Tensor]:
        """Every item's embeddings, from its owner; local: those computed on this rank."""
        local_results, gathered = iter(local), []
        for item, rank in zip(items, whose, strict=True):
            embeddings = next(local_results).to(self.dtype) if rank == self.group.rank else None
            width = self.group.broadcast(
                self._number(0 if embeddings is None else embeddings.shape[1]), rank
            )
            if embeddings is None:
                shape = (item.length, int(width))
                embeddings = torch.empty(shape, dtype=self.dtype, device=self.device)
            gathered.append(self.group.broadcast(embeddings, rank))
        return gathered

    def _number(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self.device)


def owners(items: Sequence[MediaItem], ranks: int) -> list[int]:
    """The rank that encodes each item: longest first, each to the least loaded rank."""
    loads, owner_ranks = [0] * ranks, [0] * len(items)
    for index in sorted(range(len(items)), key=lambda index: -items[index].length):
        rank = loads.index(min(loads))
        owner_ranks[index] = rank
        loads[rank] += items[index].length
    return owner_ranks
