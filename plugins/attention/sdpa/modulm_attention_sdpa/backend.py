"""Attention over paged memory in plain torch: runs wherever torch does.

A step is cut into pieces. A piece is some rows with the same number of new tokens, and for each
of them the slots of the cached tokens it may see, laid out so that they end together. Rows with
one new token go together, others by themselves, cut so that no piece grows beyond a bound. A
piece gathers its keys and values and does one batched attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
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
from modulm.errors import ConfigError
from modulm_attention_sdpa.kept import (
    INTEGERS,
    kept_width,
    narrowed,
    packed,
    unpacked,
    widened,
)

__all__ = ["SdpaAttention"]

_KV_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
#: Most queries of one row in a piece, and most gathered tokens of a piece.
_QUERIES = 256
_GATHERED = 65536
#: What goes with parts that are merged.
_MERGED = {"partial", "value_dim", "softcap", "latent", "scales"}


@frozen(eq=False)
class _Piece:
    """Rows with as many queries each, and the keys that they may see, which end together.

    tokens: [R * Q] int64 places in the step; firsts: [R] int64, the position of the first key,
    below zero in a row shorter than the longest; slots: [R, L] int64 of the keys; distance: [R, Q,
    L] int32, query position less key position; visible: [R, Q, L] bool, or for some heads each [R,
    heads or 1, Q, L].
    """

    rows: int
    tokens: Tensor
    firsts: Tensor
    slots: Tensor
    distance: Tensor
    visible: Tensor


#: A piece whose tensors are arrays still.
_Arrays = tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@frozen(eq=False)
class _StepPlan(AttentionPlan):
    """Computed by torch, so there is nothing to record."""

    slots: Tensor
    pieces: tuple[_Piece, ...]


class SdpaAttention(AttentionBackend):
    """The portable cache [blocks, block size, kv heads, head dim + value dim]."""

    name = "sdpa"
    api = 3
    features = frozenset(
        [
            "value_dim",
            "window",
            "softcap",
            "sinks",
            "alibi",
            "biases",
            "causal",
            "latent",
            "selection",
            "picks",
            "scales",
            "spans",
            "cross",
            "partial",
        ]
    )

    def __init__(
        self,
        spec: AttentionSpec,
        platform: Platform,
        ops: Ops,
        block_size: int,
        options: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(spec, platform, ops, block_size, options)
        self.staging = platform.staging()
        self.causal = spec.causal and not spec.cross
        if options:
            raise ConfigError("attention.sdpa", f"takes no options, got {sorted(options)}")

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        if spec.kv_dtype not in _KV_DTYPES:
            return f"keeps keys and values in {', '.join(_KV_DTYPES)}, not {spec.kv_dtype}"
        if spec.partial and (alone := spec.features - _MERGED):
            return f"makes no parts of attention with {', '.join(sorted(alone))}"
        if spec.kv_dtype in INTEGERS and (spec.latent or spec.picks):
            return f"keeps no latent and no keys that are picked by in {spec.kv_dtype}"
        if spec.kv_dtype == "int4" and (spec.head_dim % 2 or (spec.value_dim or 0) % 2):
            return f"keeps pairs of numbers in int4, and heads of {spec.head_dim} are none"
        return None

    def layout(self, blocks: int) -> KVLayout:
        spec = self.spec
        values = 0 if spec.latent or spec.picks else spec.value_dim or spec.head_dim
        width = spec.head_dim + values
        heads = 1 if spec.latent else spec.kv_heads
        if spec.kv_dtype in INTEGERS:
            width = kept_width(spec.kv_dtype, spec.head_dim) + kept_width(spec.kv_dtype, values)
            one = self.block_size * heads * width
            return KVLayout((blocks, self.block_size, heads, width), "uint8", one)
        one = self.block_size * heads * width * getattr(torch, spec.kv_dtype).itemsize
        return KVLayout((blocks, self.block_size, heads, width), spec.kv_dtype, one)

    def plan(self, step: StepLayout) -> _StepPlan:
        if step.encoder_lens is not None:
            step = evolve(step, context_lens=step.encoder_lens)
        parts = list(self._pieces(step))
        arrays = [array for _, *given in parts for array in given]
        slots, *tensors = self.staging.send((step.slots, *arrays))
        pieces = [
            _Piece(rows, *tensors[5 * place : 5 * place + 5])
            for place, (rows, *_) in enumerate(parts)
        ]
        return _StepPlan(slots, tuple(pieces))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        plan: _StepPlan,
        out: Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> None:
        held = cache.view(-1, *cache.shape[2:])
        if self.spec.kv_dtype in INTEGERS:
            held[plan.slots] = torch.cat([packed(x, self.spec.kv_dtype) for x in (k, v)], -1)
        else:
            held[plan.slots, :, : q.shape[-1]] = narrowed(k, inputs.k_scale, cache.dtype)
            if cache.shape[-1] > q.shape[-1]:
                held[plan.slots, :, q.shape[-1] :] = narrowed(v, inputs.v_scale, cache.dtype)
        if inputs.head_weights is not None:
            for piece in plan.pieces:
                self._pick(q, held, piece, out, inputs.head_weights)
            return
        for whole in plan.pieces:
            piece = whole if inputs.selected is None else self._chosen(whole, inputs.selected)
            keys, values = self._found(held[piece.slots], q.dtype, inputs)
            queries = q[piece.tokens].view(piece.rows, -1, *q.shape[1:]).transpose(1, 2)
            if inputs.lse is not None:
                result, lse = self._attend_part(queries, keys, values, piece.visible)
                inputs.lse[piece.tokens] = lse.transpose(1, 2).flatten(0, 1)
                out[piece.tokens] = result.transpose(1, 2).reshape(-1, *out.shape[1:]).to(out.dtype)
                continue
            result = self._attend(queries, keys, values, piece, inputs)
            out[piece.tokens] = result.transpose(1, 2).reshape(-1, *out.shape[1:])

    def _found(
        self, held: Tensor, dtype: torch.dtype, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [R, Hk, L, D] of what is kept [R, L, Hk, width]."""
        spec = self.spec
        if spec.kv_dtype in INTEGERS:
            cut = kept_width(spec.kv_dtype, spec.head_dim)
            pair = (held[..., :cut], held[..., cut:])
            keys, values = (unpacked(part, spec.kv_dtype, dtype) for part in pair)
            return keys.transpose(1, 2), values.transpose(1, 2)
        found = held.to(dtype).transpose(1, 2)
        keys = widened(found[..., : spec.head_dim], inputs.k_scale)
        values = found[..., : spec.latent] if spec.latent else found[..., spec.head_dim :]
        return keys, widened(values, inputs.v_scale)

    def _chosen(self, piece: _Piece, selected: Tensor) -> _Piece:
        """The piece with what its queries see of `selected` only.

        Single queries that chose tokens, the same for all heads, read no more than those.
        """
        queries, run = piece.distance.shape[1], self.spec.selection
        chosen = selected[piece.tokens].view(piece.rows, queries, *selected.shape[1:]).long()
        if queries == run == chosen.shape[2] == 1:
            places = chosen[:, :, 0] - piece.firsts[:, None, None]
            here, at = (places >= 0) & (chosen[:, :, 0] >= 0), places.clamp_min(0)
            return evolve(
                piece,
                slots=piece.slots.gather(1, at[:, 0]),
                distance=piece.distance.gather(2, at),
                visible=piece.visible.gather(2, at) & here,
            )
        keys = piece.firsts[:, None] + torch.arange(piece.slots.shape[1], device=selected.device)
        runs = keys.clamp_min(0)[:, None, None] // run
        marked = selected.new_zeros(*chosen.shape[:3], int(piece.slots.shape[1]) + 2)
        base = piece.firsts.clamp_min(0) // run - 1
        marks = (chosen - base[:, None, None, None]).clamp(0, marked.shape[-1] - 1)
        marked.scatter_(3, marks, 1)
        seen = marked.gather(3, (runs - base[:, None, None, None]).expand(*chosen.shape[:3], -1))
        visible = piece.visible[:, None] & (seen > 0).transpose(1, 2)
        return evolve(piece, visible=self._for_heads(visible))

    def _for_heads(self, visible: Tensor) -> Tensor:
        """visible: [R, kv heads or 1, Q, L] -> [R, heads or 1, Q, L]."""
        kinds = visible.shape[1]
        return visible if kinds == 1 else visible.repeat_interleave(self.spec.heads // kinds, 1)

    def _pick(self, q: Tensor, held: Tensor, piece: _Piece, out: Tensor, weights: Tensor) -> None:
        """Fill `out` [tokens, 1, picks] for the queries of one piece, a head at a time."""
        queries = q[piece.tokens].view(piece.rows, -1, *q.shape[1:]).float() * self.spec.scale
        keys = held[piece.slots][:, :, 0].float().transpose(1, 2)
        weights = weights[piece.tokens].view(*queries.shape[:3], 1)
        scores = queries.new_zeros(*queries.shape[:2], keys.shape[2])
        for head in range(q.shape[1]):
            scores += (queries[:, :, head] @ keys).relu_() * weights[:, :, head]
        scores.masked_fill_(~piece.visible, -torch.inf)
        found = scores.topk(min(self.spec.picks, scores.shape[-1]), -1)
        positions = found.indices + piece.firsts[:, None, None]
        positions = positions.masked_fill(found.values.isneginf(), -1).sort(-1).values
        picked = positions.new_full((*positions.shape[:2], self.spec.picks), -1)
        picked[..., self.spec.picks - positions.shape[-1] :] = positions
        out[piece.tokens] = picked.view(-1, 1, self.spec.picks).to(out.dtype)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        piece: _Piece,
        inputs: AttentionInputs,
    ) -> Tensor:
        """q: [R, Hq, Q, D]; k: [R, Hk, L, D]; v: [R, Hk, L, Dv] -> [R, Hq, Q, Dv]."""
        spec, sinks, alibi = self.spec, inputs.sinks, inputs.alibi
        visible = piece.visible if piece.visible.dim() == 4 else piece.visible[:, None]
        if not (spec.softcap or sinks is not None or spec.alibi or spec.biases):
            grouped = q.shape[1] != k.shape[1]
            if grouped and q.shape[2] == 1 and visible.shape[1] == 1:
                return self._attend_folded(q, k, v, visible)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, scale=spec.scale, enable_gqa=grouped
            )
        group = q.shape[1] // k.shape[1]
        scores = torch.matmul(
            q.float() * spec.scale, k.float().repeat_interleave(group, 1).transpose(-1, -2)
        )
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if alibi is not None:
            scores = scores - alibi[:, None, None] * piece.distance[:, None]
        if inputs.biases is not None:
            near = piece.distance.clamp(0, inputs.biases.shape[1] - 1)
            scores = scores + inputs.biases[:, near].transpose(0, 1)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return torch.matmul(weights, v.float().repeat_interleave(group, 1)).to(q.dtype)

    def _attend_part(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[R, Hq, Q, Dv] and the log of the sum of exponents [R, Hq, Q], both fp32; shapes else as
        in `_attend`, visible: [R, Q, L].
        """
        folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]).float() * self.spec.scale
        scores = torch.matmul(folded, k.float().transpose(-1, -2))
        scores = scores.view(*q.shape[:3], -1)
        if self.spec.softcap:
            scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().nan_to_num_(0.0)
        found = torch.matmul(weights.view(*folded.shape[:3], -1), v.float())
        return found.view(*q.shape[:3], -1), lse

    def _attend_folded(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """One query per row: the heads that share a key head become its queries, so that keys
        and values are read once instead of being repeated for each; shapes as in `_attend`.
        """
        rows, heads, _, size = q.shape
        queries = q.reshape(rows, k.shape[1], -1, size)
        found = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=visible, scale=self.spec.scale
        )
        return found.reshape(rows, heads, 1, -1)

    def _pieces(self, step: StepLayout) -> Iterator[_Arrays]:
        counts = np.diff(step.query_starts)
        single = np.flatnonzero(counts == 1)
        while len(single):
            lengths = self._reach(step.context_lens[single], 1)
            take = max(1, int(np.count_nonzero(_padded(lengths) <= _GATHERED)))
            some, single = single[:take], single[take:]
            yield self._piece(step, some, np.zeros(len(some), np.int64), 1)
        for row in np.flatnonzero(counts > 1):
            for first in range(0, int(counts[row]), _QUERIES):
                queries = min(_QUERIES, int(counts[row]) - first)
                one = np.array([row])
                yield self._piece(step, one, np.array([first]), queries)

    def _reach(self, ends: np.ndarray, queries: int) -> np.ndarray:
        """How many of the `ends` cached tokens the last `queries` of them look back over."""
        if self.spec.window is None or not self.causal:
            return ends
        return np.minimum(ends, self.spec.window + queries - 1)

    def _piece(
        self,
        step: StepLayout,
        rows: np.ndarray,
        first: np.ndarray,
        queries: int,
    ) -> _Arrays:
        """`queries` tokens of each row, from its `first`; rows [R], first [R]."""
        counts = np.diff(step.query_starts)[rows]
        before = step.context_lens[rows] - counts + first
        ends = before + queries if self.causal else step.context_lens[rows]
        tokens = (step.query_starts[rows] + first)[:, None] + np.arange(queries)
        if step.seen is not None:
            ends = np.maximum(step.seen[tokens[:, -1]].astype(np.int64), 1)
        length = int(self._reach(ends, queries).max())
        spans = _spans_in(step, rows, before, queries) if queries > 1 else ()
        if spans:
            far = max(int(ends[0]), *(end for _, end in spans))
            ends, length = np.array([far]), length + far - int(ends[0])
        keys = ends[:, None] - length + np.arange(length)
        blocks = step.block_tables[rows[:, None], np.maximum(keys, 0) // step.block_size]
        slots = blocks.astype(np.int64) * step.block_size + np.maximum(keys, 0) % step.block_size
        positions = before[:, None] + np.arange(queries)
        distance = positions[:, :, None] - keys[:, None, :]
        visible = np.broadcast_to(keys[:, None, :] >= 0, distance.shape)
        if step.seen is not None:
            visible = visible & (keys[:, None, :] < step.seen[tokens][:, :, None])
        elif self.causal:
            allowed = distance >= 0
            for begin, end in spans:
                inside = (positions >= begin) & (positions < end)
                allowed |= inside[:, :, None] & ((keys >= begin) & (keys < end))[:, None, :]
            visible = visible & allowed
        if self.spec.window is not None:
            back = distance if self.causal else np.abs(distance)
            visible = visible & (back < self.spec.window)
        places = tokens.ravel().astype(np.int64)
        seen = visible.copy()
        return len(rows), places, keys[:, 0].copy(), slots, distance.astype(np.int32), seen


def _spans_in(
    step: StepLayout, rows: np.ndarray, before: np.ndarray, queries: int
) -> tuple[tuple[int, int], ...]:
    """(first, end) of the spans that queries of a piece lie in; of one row by itself."""
    if step.spans is None or len(rows) != 1:
        return ()
    first, last = int(before[0]), int(before[0]) + queries
    own = step.spans[step.spans[:, 0] == rows[0], 1:].tolist()
    return tuple((begin, end) for begin, end in own if begin < last and first < end)


def _padded(lengths: np.ndarray) -> np.ndarray:
    """Tokens that a piece of the first 1, 2, ... rows gathers; never falls."""
    padded: np.ndarray = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
    return padded
