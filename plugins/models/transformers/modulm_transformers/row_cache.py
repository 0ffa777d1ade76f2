"""An attention backend that only stores: rows of numbers per token, which transformers' code reads.

Layers that transformers' own code computes have no attention of ours. What their caches hold per
token lies in blocks like the keys and values of others, so that prefixes are reused, rows
preempted, and blocks moved as usual.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.attention import (
    PLAIN,
    AttentionBackend,
    AttentionInputs,
    AttentionPlan,
    AttentionSpec,
    KVLayout,
    StepLayout,
)
from modulm.contracts.ops import Ops
from modulm.contracts.platform import Platform
from modulm.errors import EngineError

__all__ = ["RowCache", "RowPlan", "RowSpec", "row_spec"]

_ROWS = "rows"


@frozen
class RowSpec(AttentionSpec):
    """`head_dim` numbers of type `kv_dtype` for each token. No attention is computed."""

    @property
    def features(self) -> frozenset[str]:
        """A feature that backends of attention lack, so that they are not chosen."""
        return frozenset({_ROWS})


def row_spec(
    width: int, dtype: torch.dtype, *, window: int | None = None, cross: int = 0
) -> RowSpec:
    """Spec of a cache of `width` numbers per token, or per encoder token with `cross`."""
    name = str(dtype).removeprefix("torch.")
    return RowSpec(
        heads=1, kv_heads=1, head_dim=width, scale=1.0, dtype=name, kv_dtype=name,
        window=window, cross=cross,
    )  # fmt: skip


@frozen(eq=False)
class RowPlan(AttentionPlan):
    """Slots of one step.

    slots: [new tokens] int64, where they are written. tables: [rows, blocks] int64. lengths: stored
    tokens of each row, those of this step included.
    """

    slots: Tensor
    tables: Tensor
    lengths: tuple[int, ...]
    block_size: int

    def write(self, cache: Tensor, rows: Tensor) -> None:
        """Store the step's tokens. rows: [new tokens, width]."""
        cache.view(-1, cache.shape[-1])[self.slots] = rows.to(cache.dtype)

    def read(self, cache: Tensor, row: int, first: int, end: int) -> Tensor:
        """Return [end - first, width], what is stored for these tokens of a row."""
        at = torch.arange(first, end, device=cache.device)
        slots = self.tables[row, at // self.block_size] * self.block_size + at % self.block_size
        return cache.view(-1, cache.shape[-1])[slots]


class RowCache(AttentionBackend):
    """The cache [blocks, block size, width]."""

    name = "transformers"
    api = 3
    features = frozenset({_ROWS})

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        if not isinstance(spec, RowSpec):
            return "only stores what transformers' own code caches"
        if spec.masks:
            return "has no masks within a step, which drafts need"
        return None

    def layout(self, blocks: int) -> KVLayout:
        width, dtype = self.spec.head_dim, self.spec.kv_dtype
        size = self.block_size * width * getattr(torch, dtype).itemsize
        return KVLayout((blocks, self.block_size, width), dtype, size)

    def plan(self, step: StepLayout) -> RowPlan:
        lengths = step.context_lens if step.encoder_lens is None else step.encoder_lens
        device = self.platform.device
        slots, tables = (
            torch.from_numpy(np.array(array, dtype=np.int64)).to(device)
            for array in (step.slots, step.block_tables)
        )
        return RowPlan(slots, tables, tuple(lengths.tolist()), self.block_size)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        plan: AttentionPlan,
        out: Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> None:
        raise EngineError("the attention backend 'transformers' stores rows and computes nothing")
