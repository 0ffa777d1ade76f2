"""Positions told by what they add to scores (Raffel et al., arXiv 1910.10683, section 2.1).

Each head has a number for each bucket of distances: near ones have their own, farther ones share.
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
    """The table of one layer, or of all that share it. buckets, furthest: how many buckets there
    are, and from which distance on all is in the last; both: keys behind the query have half of the
    buckets. `table` is there once the weights are loaded: [heads, furthest + 1] fp32 by how far
    before the query a key stands, or [heads, 2 * furthest + 1] from the farthest behind it on.
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
        places = bucket_of(distances, self.buckets, self.furthest, self.both)
        self.table = self.weight.detach()[places.to(self.weight.device)].T.contiguous()

    def between(self, length: int) -> Tensor:
        """[heads, length, length] fp32 of a text's queries and keys, in both directions."""
        at = torch.arange(length, device=self.table.device)
        distances = (at[:, None] - at).clamp(-self.furthest, self.furthest)
        return self.table[:, distances + self.furthest]


def bucket_of(distances: Tensor, count: int, furthest: int, both: bool) -> Tensor:
    """The bucket of each distance, how far before the query a key stands; below zero it stands
    behind it, which counts as no distance unless `both`. The first half of the buckets have one
    distance each; in the others distances grow by the same factor from one to the next.
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
