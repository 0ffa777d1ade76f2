"""Base class of encoders, and bidirectional attention. Prompts run whole; nothing is cached."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, CacheSpec, Model
from modulm.contracts.weight_names import WeightNames
from modulm_layers.attention import AttentionNames

if TYPE_CHECKING:
    from modulm.nn.builder import Builder
    from modulm_layers.rope import Rope

__all__ = [
    "BidirectionalAttention",
    "Encoder",
    "Segment",
    "attend_rows",
    "segments",
    "step_segments",
]

#: The segments of a step, which its layers share.
_OF_STEP: WeakKeyDictionary[Batch, tuple[Segment, ...]] = WeakKeyDictionary()
#: Row lengths are padded to a multiple of this, so that a step of short texts needs few calls.
_MULTIPLE = 16
#: Queries of a layer with a window that are computed at once, with the keys near them.
_QUERIES = 256


@frozen(eq=False)
class Segment:
    """Rows of a step that attend together, padded to one length.

    indices: [rows * length] int64, token indices; padding repeats the row's last token. mask:
    [rows, 1, 1 or length, length] bool, true for the tokens that each one may see. chosen: [tokens]
    int64, positions of the real tokens within `indices`. `mask` and `chosen` are None if nothing is
    padded.
    """

    rows: int
    length: int
    indices: Tensor
    mask: Tensor | None = None
    chosen: Tensor | None = None


def _traced_segment(owners: Tensor) -> Segment:
    """All rows side by side, for steps that are traced; owners: [tokens] int64, row of each."""
    mask = (owners[:, None] == owners[None, :])[None, None]
    return Segment(1, len(owners), torch.arange(len(owners), device=owners.device), mask)


def segments(batch: Batch, multiple: int = 1) -> tuple[Segment, ...]:
    """Group the step's rows by length, rounded up to a `multiple`; all layers share the result.

    The padding of a row depends only on its own length, so its results do not depend on other rows.
    Platforms that trace steps do not know lengths then; they say in `extras` which row each token
    belongs to.
    """
    if "token_rows" in batch.extras:
        return (_traced_segment(batch.extras["token_rows"]),)
    starts = batch.query_starts.tolist()
    by_length: dict[int, list[tuple[int, int]]] = {}
    for first, end in pairwise(starts):
        length = -(-(end - first) // multiple) * multiple
        by_length.setdefault(length, []).append((first, end - first))
    device = batch.tokens.device
    return tuple(_segment(length, spans, device) for length, spans in by_length.items())


def step_segments(batch: Batch) -> tuple[Segment, ...]:
    """Return the segments of a step's rows, computed once for all layers."""
    rows = _OF_STEP.get(batch)
    if rows is None:
        _OF_STEP[batch] = rows = segments(batch, _MULTIPLE)
    return rows


def _segment(length: int, spans: Sequence[tuple[int, int]], device: torch.device) -> Segment:
    """Build a segment; spans: (first token, number of tokens) of each row."""
    firsts, counts = torch.tensor(spans).T[..., None]
    steps = torch.arange(length)
    indices = (firsts + torch.minimum(steps, counts - 1)).flatten().to(device)
    valid = steps < counts
    if bool(valid.all()):
        return Segment(len(spans), length, indices)
    chosen = valid.flatten().nonzero().flatten()
    mask = valid[:, None, None].to(device)
    return Segment(len(spans), length, indices, mask, chosen.to(device))


class BidirectionalAttention(Module):
    """Attention in which a token sees its whole row, or `window` tokens on either side.

    kv_heads: number of key and value heads; 0 means as many as `heads`. head_dim: 0 means hidden /
    heads.
    """

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        heads: int,
        names: AttentionNames,
        kv_heads: int = 0,
        head_dim: int = 0,
        bias: bool = True,
        rope: Rope | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        group = b.shared.mesh.tensor
        self.heads = group.part(heads, f"attention heads of {b.prefix}")
        self.size = head_dim or hidden // heads
        self.kv_heads = b.share(kv_heads or heads, 1)
        self.ops, self.window = b.ops, window
        q_size, kv_size = heads * self.size, (kv_heads or heads) * self.size
        parts = {names.q: q_size, names.k: kv_size, names.v: kv_size}
        self.qkv = b.linear(names.qkv, hidden, parts, bias=bias, least=self.size)
        self.out = b.row_linear(names.out, q_size, hidden, bias=bias)
        self.rotation = None if rope is None else b.rope(rope)

    def forward(self, x: Tensor, batch: Batch, rows: tuple[Segment, ...]) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        qkv = self.qkv(x).view(len(x), -1, self.size)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.rotation is not None:
            q, k = q.contiguous(), k.contiguous()
            self.ops.rotary(q, k, batch.positions, self.rotation.cos_sin, True)
        out = attend_rows(q, k, v, rows, window=self.window)
        attended: Tensor = self.out(out.flatten(1))
        return attended


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Sequence[Segment],
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend within each row, in both directions: [tokens, heads, value_dim].

    q: [tokens, heads, head_dim]; k: [tokens, kv_heads, head_dim]; v: [tokens, kv_heads, value_dim].
    window: tokens seen on either side, None for all.
    """
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for segment in rows:
        seen, indices = _attend(q, k, v, segment, window, scale).flatten(0, 1), segment.indices
        if segment.chosen is not None:
            seen, indices = seen[segment.chosen], indices[segment.chosen]
        out[indices] = seen
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, segment: Segment, window: int | None, scale: float | None
) -> Tensor:
    """Attend within one segment: [rows, length, heads, value_dim]."""
    grouped = q.shape[1] != k.shape[1]
    shape = (segment.rows, segment.length)
    q, k, v = (torch.unflatten(t[segment.indices], 0, shape).transpose(1, 2) for t in (q, k, v))
    mask, length = segment.mask, segment.length
    attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=grouped)
    if window is None or length <= window + 1:
        return attend(q, k, v, attn_mask=mask).transpose(1, 2)
    out = q.new_empty(segment.rows, length, q.shape[1], v.shape[-1])
    for first in range(0, length, _QUERIES):
        end = min(first + _QUERIES, length)
        begin, last = max(first - window, 0), min(end + window, length)
        near = _band(end - first, last - begin, first - begin, window, q.device)
        if mask is not None:
            rows = slice(first, end) if mask.shape[2] > 1 else slice(None)
            near = near & mask[:, :, rows, begin:last]
        queries, keys, values = q[:, :, first:end], k[:, :, begin:last], v[:, :, begin:last]
        out[:, first:end] = attend(queries, keys, values, attn_mask=near).transpose(1, 2)
    return out


def _band(queries: int, keys: int, first: int, window: int, device: torch.device) -> Tensor:
    """Return [queries, keys] bool: whether a query sees a key. first: key of the first query."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return seen.tril(first + window).triu(first - window)


class Encoder(Module, Model):
    """Base class of encoders. There is no cache, so each prompt runs whole in one step.

    A family sets `api`, `config_type` and `names`, and builds `embed` (called with the batch),
    `layers` (called as `layer(x, batch, segments)`) and `norm` or None. `head` maps vectors to
    classes; without it the vectors are the result.
    """

    names: ClassVar[WeightNames] = WeightNames()
    tasks: ClassVar[tuple[str, ...]] = ("embed", "token_embed")
    embed: Module
    layers: Any
    norm: Module | None
    head: Module | None

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.head = None

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return cls.names

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return ()

    @property
    def pooling(self) -> str:
        return "CLS"

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states of the last layer: [tokens, hidden]."""
        rows = segments(batch, _MULTIPLE)
        x: Tensor = self.embed(batch)
        for layer in self.layers:
            x = layer(x, batch, rows)
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, classes], or the vectors themselves without a head."""
        return hidden if self.head is None else self.head(hidden)
