"""Experts that are distributed over the ranks of several replicas.

In each layer every rank gathers the tokens of all replicas, with their expert choices and weights,
and applies its own experts. The results are summed in the order of ranks, and each replica takes
its own tokens. All replicas must therefore run the same layers: an idle one runs them with an empty
batch (`modulm_distributed.rounds`).
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
    """Sends tokens to the experts of other replicas (`Mesh.spread`).

    everyone: all ranks that hold experts of a layer, replica by replica. data: one rank of each
    replica. empty: whether the current batch of this replica is empty.
    """

    def __init__(self, everyone: ProcessGroup, data: ProcessGroup, device: torch.device) -> None:
        self.empty, self._device = False, device
        self._everyone, self._data = everyone, data
        self._layers = 0
        #: The first layer of a pass; rows of the current pass in this replica, and in each.
        self._first: int | None = None
        self._rows = 0
        self._counts: list[int] = []

    def layer(self, fused: Callable[..., Tensor], shard: Shard, name: str) -> Callable[..., Tensor]:
        """Wrap `fused` for the experts of one layer, of which this rank has `shard`."""
        self._layers += 1
        return partial(self._run_layer, self._layers, fused, shard)

    def report(self) -> None:
        """Return None: tokens are not counted."""

    def used(self, world: ProcessGroup) -> bool:
        """Return whether any layer has experts; world: all ranks of this replica."""
        return bool(world.all_gather(torch.tensor([self._layers], device=self._device)).any())

    def _run_layer(
        self,
        layer: int,
        fused: Callable[..., Tensor],
        shard: Shard,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        *stacks: object,
        **more: Any,
    ) -> Tensor:
        """x: [T, H] of this replica; weights, ids: [T, top_k] -> [T, H], zeros if `empty`."""
        if self._first is None:
            self._first = layer
        if layer == self._first:
            self._begin(len(x))
        if len(x) != self._rows:
            raise EngineError(f"experts of {len(x)} rows in a step of {self._rows}")
        every, weights, ids = _gather((x, weights, ids), self._counts, self._data)
        local_ids = ids - shard.start
        here = (local_ids >= 0) & (local_ids < shard.size)
        part = fused(every, weights * here, local_ids.where(here, 0), *stacks, **more)
        whole = self._everyone.all_reduce(part.contiguous())
        mine = whole.split_with_sizes(self._counts)[self._data.rank]
        return torch.zeros_like(x) if self.empty else mine

    def _begin(self, rows: int) -> None:
        """Exchange the number of rows of each replica."""
        own_rows = torch.tensor([0 if self.empty else rows], device=self._device)
        self._rows, self._counts = rows, self._data.all_gather(own_rows).tolist()


def _gather(
    tensors: Sequence[Tensor], counts: Sequence[int], group: ProcessGroup
) -> tuple[Tensor, ...]:
    """Gather the rows of matrices of all ranks, in their order. counts: rows of each rank."""
    parts = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
    widths = [part.shape[1] for part in parts]
    own_rows, wide = counts[group.rank], sum(widths)
    packed = parts[0].new_zeros(max(counts), wide)
    packed[:own_rows] = torch.cat(parts, 1)[:own_rows]
    every = group.all_gather(packed).view(len(packed), group.size, wide)
    rows = torch.cat([every[:count, rank] for rank, count in enumerate(counts)])
    split = zip(rows.split_with_sizes(widths, 1), tensors, strict=True)
    whole = torch.contiguous_format
    return tuple(part.clone(memory_format=whole).view(like.dtype) for part, like in split)
