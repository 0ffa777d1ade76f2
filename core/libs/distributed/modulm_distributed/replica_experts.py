"""Experts that the ranks of several replicas hold between them.

In each layer the tokens of all replicas, with their experts and weights, are gathered on every
rank, which applies its own experts to them; each replica takes its tokens of the sum, made in the
order of the ranks. So all replicas must compute as many layers of experts: one without requests
does so with an empty batch (`modulm_distributed.rounds`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modulm.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from modulm.contracts.quantization import Shard
    from modulm.parallel import ProcessGroup

__all__ = ["ReplicaExperts"]


class ReplicaExperts:
    """How tokens reach experts of other replicas' ranks: `Mesh.spread`.

    everyone: the ranks that hold the experts of a layer, those of each replica in turn; data: one
    of each replica. empty: what this replica computes is only there to take part.
    """

    def __init__(self, everyone: ProcessGroup, data: ProcessGroup, device: torch.device) -> None:
        self.empty, self._device = False, device
        self._everyone, self._data = everyone, data
        self._layers = 0
        #: The layer that a pass begins with; of the pass: rows here, and those of each replica.
        self._first: int | None = None
        self._rows = 0
        self._counts: list[int] = []

    def layer(self, fused: Callable[..., Tensor], own: Shard, name: str) -> Callable[..., Tensor]:
        """`fused` for one layer's experts, of which this rank has `own`."""
        self._layers += 1
        return partial(self._of_all, self._layers, fused, own)

    def report(self) -> None:
        """Nothing is counted."""

    def used(self, world: ProcessGroup) -> bool:
        """Whether any layer has experts; world: all ranks of this replica."""
        return bool(world.all_gather(torch.tensor([self._layers], device=self._device)).any())

    def _of_all(
        self,
        layer: int,
        fused: Callable[..., Tensor],
        own: Shard,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        *stacks: object,
        **more: Any,
    ) -> Tensor:
        """x: [T, H] of this replica; weights, ids: [T, top_k] -> [T, H]; zeros, which nobody looks
        at, for a batch that is only there to take part.
        """
        if self._first is None:
            self._first = layer
        if layer == self._first:
            self._begin(len(x))
        if len(x) != self._rows:
            raise EngineError(f"experts of {len(x)} rows in a step of {self._rows}")
        every, weights, ids = _gathered((x, weights, ids), self._counts, self._data)
        places = ids - own.start
        here = (places >= 0) & (places < own.size)
        part = fused(every, weights * here, places.where(here, 0), *stacks, **more)
        whole = self._everyone.all_reduce(part.contiguous())
        mine = whole.split_with_sizes(self._counts)[self._data.rank]
        return torch.zeros_like(x) if self.empty else mine

    def _begin(self, rows: int) -> None:
        """Tell one another how many rows each replica has."""
        own = torch.tensor([0 if self.empty else rows], device=self._device)
        self._rows, self._counts = rows, self._data.all_gather(own).tolist()


def _gathered(
    tensors: Sequence[Tensor], counts: Sequence[int], group: ProcessGroup
) -> tuple[Tensor, ...]:
    """Rows of matrices of each rank, one rank after the other; counts: how many each one has."""
    parts = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
    widths = [part.shape[1] for part in parts]
    own, wide = counts[group.rank], sum(widths)
    packed = parts[0].new_zeros(max(counts), wide)
    packed[:own] = torch.cat(parts, 1)[:own]
    every = group.all_gather(packed).view(len(packed), group.size, wide)
    rows = torch.cat([every[:count, rank] for rank, count in enumerate(counts)])
    split = zip(rows.split_with_sizes(widths, 1), tensors, strict=True)
    whole = torch.contiguous_format
    return tuple(part.clone(memory_format=whole).view(like.dtype) for part, like in split)
