"""Relative positions as score biases (Raffel et al., arXiv 1910.10683, section 2.1).

Each head has one bias per distance bucket. Each small distance has its own bucket; larger distances
share buckets.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from modulm.nn.builder import Builder

__all__ = ["RelativePositions", "bucket_of"]


class RelativePositions(Module):
    """The bias table of one layer, or of all layers that share it.

    buckets: number of buckets. furthest: all distances from here on share the last bucket. both:
    keys after the query use half of the buckets.

    `table` is set once the weights are loaded: [heads, furthest + 1] fp32, indexed by how far the
    key lies before the query; with `both`, [heads, 2 * furthest + 1], from the farthest key after
    the query on.
    """

    weight: Tensor
    table: Tensor

    def __init__(
        self,
        b: Builder,
        *,
        heads: int,
        buckets: int,
        furthest: int,
        both: bool = False,
        name: str = "relative_attention_bias.weight",
    ) -> None:
        super().__init__()
        self.buckets, self.furthest, self.both = buckets, furthest, both
        shards = (b.shared.mesh.tensor.shard(heads, b.prefix),)
        b.cut_parameter(name, self, "weight", shards, before=(buckets,), dtype=torch.float32)
        b.after(self, self._lay_out)

    def _lay_out(self) -> None:
        distances = torch.arange(-self.furthest if self.both else 0, self.furthest + 1)
        buckets = bucket_of(distances, self.buckets, self.furthest, self.both)
        self.table = self.weight.detach()[buckets.to(self.weight.device)].T.contiguous()

    def between(self, length: int) -> Tensor:
        """[heads, length, length] fp32: biases between all queries and keys, in both directions."""
        at = torch.arange(length, device=self.table.device)
        distances = (at[:, None] - at).clamp(-self.furthest, self.furthest)
        return self.table[:, distances + self.furthest]


def bucket_of(distances: Tensor, count: int, furthest: int, both: bool) -> Tensor:
    """Return the bucket of each distance (query position minus key position).

    Negative distances count as 0 unless `both`. The first half of the buckets hold one distance
    each; the sizes of the others grow by a constant factor.
    """
    first: Tensor | int = 0
    if both:
        count //= 2
        first = (distances < 0) * count
        distances = distances.abs()
    distances = distances.clamp_min(0)
    exact = count // 2
    grown = (distances / exact).log() / math.log(furthest / exact) * (count - exact)
    far = (exact + grown.clamp_min(0).long()).clamp_max(count - 1)
    return first + torch.where(distances < exact, distances, far)
