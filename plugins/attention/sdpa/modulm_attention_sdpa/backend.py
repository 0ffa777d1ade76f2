"""Paged attention in plain torch. Runs wherever torch runs.

A step is divided into pieces. A piece holds rows with the same number of new tokens and, for each
row, the cache slots that it may attend to, right-aligned. Rows with one new token share a piece;
other rows get pieces of their own, split so that no piece exceeds a size limit. Each piece gathers
its keys and values and runs one batched attention.
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
from modulm_attention_sdpa.narrow_kv import (
    LATENT,
    PACKED,
    REFUSED,
    narrow,
    pack,
    packed_width,
    unpack,
    widen,
)

__all__ = ["SdpaAttention"]

_KV_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", *PACKED)
#: Limits of a piece: queries of one row, and gathered tokens.
_QUERIES = 256
_GATHERED = 65536
#: Features that are supported when partial results are merged.
_MERGED = {"partial", "value_dim", "softcap", "latent", "scales"}
#: Features supported with masks: those that do not depend on the distance between tokens.
_MASKED = {"masks", "value_dim", "softcap", "sinks", "latent", "scales", "spans"}


@frozen(eq=False)
class _Piece:
    """Rows with the same number of queries, and their keys, right-aligned.

    tokens: [R * Q] int64, indices in the step. firsts: [R] int64, the position of the first key,
    negative in rows shorter than the longest. slots: [R, L] int64, cache slots of the keys.
    distance: [R, Q, L] int32, query position minus key position. visible: [R, Q, L] bool, or [R,
    heads or 1, Q, L] if heads differ.
    """

    rows: int
    tokens: Tensor
    firsts: Tensor
    slots: Tensor
    distance: Tensor
    visible: Tensor


#: A piece as numpy arrays, before it is sent to the device.
_Arrays = tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@frozen(eq=False)
class _StepPlan(AttentionPlan):
    """The pieces of a step. Plain torch operations are not recorded."""

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
            "masks",
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
        # Beside a latent cache with scales, an indexer's keys have one each.
        indexer = bool(spec.picks) and spec.kv_dtype in LATENT
        self.packed = "fp8_per_token_head" if indexer else ""
        if spec.kv_dtype in PACKED and not indexer:
            self.packed = spec.kv_dtype
        if options:
            raise ConfigError("attention.sdpa", f"takes no options, got {sorted(options)}")

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        if spec.kv_dtype in REFUSED:
            return f"{spec.kv_dtype} {REFUSED[spec.kv_dtype]}"
        if spec.kv_dtype not in _KV_DTYPES:
            return f"supports KV caches in {', '.join(_KV_DTYPES)}, not {spec.kv_dtype}"
        if spec.partial and (unsupported := spec.features - _MERGED):
            return f"cannot merge partial results with {', '.join(sorted(unsupported))}"
        if spec.masks and (unsupported := spec.features - _MASKED):
            return f"cannot mask tokens of a step with {', '.join(sorted(unsupported))}"
        if spec.kv_dtype in LATENT:
            if not spec.picks and (spec.latent, spec.head_dim) != (512, 576):
                return f"{spec.kv_dtype} is a format of latents of 512 with a rotated part of 64"
        elif spec.kv_dtype in PACKED and (spec.latent or spec.picks):
            return f"does not support a latent (MLA) cache or indexer keys in {spec.kv_dtype}"
        step = 2 if spec.kv_dtype == "int4" else 16 if spec.kv_dtype.startswith("nvfp4") else 1
        if not spec.picks and (spec.head_dim % step or (spec.value_dim or 0) % step):
            return f"needs head sizes that {step} divides for {spec.kv_dtype}, not {spec.head_dim}"
        return None

    def layout(self, blocks: int) -> KVLayout:
        spec = self.spec
        values = 0 if spec.latent or spec.picks else spec.value_dim or spec.head_dim
        width = spec.head_dim + values
        heads = 1 if spec.latent else spec.kv_heads
        if spec.kv_dtype in PACKED:
            width = packed_width(self.packed, spec.head_dim) + packed_width(self.packed, values)
            one = self.block_size * heads * width
            return KVLayout((blocks, self.block_size, heads, width), "uint8", one)
        one = self.block_size * heads * width * getattr(torch, spec.kv_dtype).itemsize
        return KVLayout((blocks, self.block_size, heads, width), spec.kv_dtype, one)

    def plan(self, step: StepLayout) -> _StepPlan:
        if step.encoder_lens is not None:
            step = evolve(step, context_lens=step.encoder_lens)
        parts = list(self._pieces(step))
        arrays = [array for _, *arrays_of_piece in parts for array in arrays_of_piece]
        slots, *tensors = self.staging.send((step.slots, *arrays))
        pieces = [_Piece(rows, *tensors[5 * i : 5 * i + 5]) for i, (rows, *_) in enumerate(parts)]
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
        slots = cache.view(-1, *cache.shape[2:])
        if self.spec.kv_dtype in PACKED:
            alone = self.spec.latent or self.spec.picks
            stored = (k,) if alone else (k, v)
            slots[plan.slots] = torch.cat([pack(x, self.packed) for x in stored], -1)
        else:
            slots[plan.slots, :, : q.shape[-1]] = narrow(k, inputs.k_scale, cache.dtype)
            if cache.shape[-1] > q.shape[-1]:
                slots[plan.slots, :, q.shape[-1] :] = narrow(v, inputs.v_scale, cache.dtype)
        if inputs.head_weights is not None:
            for piece in plan.pieces:
                self._pick(q, slots, piece, out, inputs.head_weights)
            return
        for whole in plan.pieces:
            piece = whole if inputs.selected is None else self._select(whole, inputs.selected)
            keys, values = self._keys_and_values(slots[piece.slots], q.dtype, inputs)
            queries = q[piece.tokens].view(piece.rows, -1, *q.shape[1:]).transpose(1, 2)
            if inputs.lse is not None:
                result, lse = self._attend_part(queries, keys, values, piece.visible)
                inputs.lse[piece.tokens] = lse.transpose(1, 2).flatten(0, 1)
                out[piece.tokens] = result.transpose(1, 2).reshape(-1, *out.shape[1:]).to(out.dtype)
                continue
            result = self._attend(queries, keys, values, piece, inputs)
            out[piece.tokens] = result.transpose(1, 2).reshape(-1, *out.shape[1:])

    def copy_slots(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        slots = cache.view(-1, *cache.shape[2:])
        slots[target] = slots[source]

    def _keys_and_values(
        self, entries: Tensor, dtype: torch.dtype, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, Hk, L, D] from cache entries [R, L, Hk, width]."""
        spec = self.spec
        if spec.kv_dtype in PACKED:
            cut = packed_width(self.packed, spec.head_dim)
            keys = unpack(entries[..., :cut], self.packed, dtype)
            if spec.latent:
                values = keys[..., : spec.latent]
            else:
                values = unpack(entries[..., cut:], self.packed, dtype)
            return keys.transpose(1, 2), values.transpose(1, 2)
        numbers = entries.to(dtype).transpose(1, 2)
        keys = widen(numbers[..., : spec.head_dim], inputs.k_scale)
        values = numbers[..., : spec.latent] if spec.latent else numbers[..., spec.head_dim :]
        return keys, widen(values, inputs.v_scale)

    def _select(self, piece: _Piece, selected: Tensor) -> _Piece:
        """Restrict a piece to the tokens in `selected` that its queries may see.

        Single queries that selected tokens, the same for all heads, gather only those tokens.
        """
        queries, run = piece.distance.shape[1], self.spec.selection
        picks = selected[piece.tokens].view(piece.rows, queries, *selected.shape[1:]).long()
        if queries == run == picks.shape[2] == 1:
            offsets = picks[:, :, 0] - piece.firsts[:, None, None]
            valid, indices = (offsets >= 0) & (picks[:, :, 0] >= 0), offsets.clamp_min(0)
            return evolve(
                piece,
                slots=piece.slots.gather(1, indices[:, 0]),
                distance=piece.distance.gather(2, indices),
                visible=piece.visible.gather(2, indices) & valid,
            )
        keys = piece.firsts[:, None] + torch.arange(piece.slots.shape[1], device=selected.device)
        runs = keys.clamp_min(0)[:, None, None] // run
        marked = selected.new_zeros(*picks.shape[:3], int(piece.slots.shape[1]) + 2)
        base = piece.firsts.clamp_min(0) // run - 1
        marks = (picks - base[:, None, None, None]).clamp(0, marked.shape[-1] - 1)
        marked.scatter_(3, marks, 1)
        seen = marked.gather(3, (runs - base[:, None, None, None]).expand(*picks.shape[:3], -1))
        visible = piece.visible[:, None] & (seen > 0).transpose(1, 2)
        return evolve(piece, visible=self._for_heads(visible))

    def _for_heads(self, visible: Tensor) -> Tensor:
        """Expand visible [R, kv heads or 1, Q, L] to [R, heads or 1, Q, L]."""
        kinds = visible.shape[1]
        return visible if kinds == 1 else visible.repeat_interleave(self.spec.heads // kinds, 1)

    def _pick(
        self, q: Tensor, entries: Tensor, piece: _Piece, out: Tensor, weights: Tensor
    ) -> None:
        """Fill `out` [tokens, 1, picks] with the positions that a piece selects, head by head."""
        queries = q[piece.tokens].view(piece.rows, -1, *q.shape[1:]).float() * self.spec.scale
        found = entries[piece.slots][:, :, 0]
        keys = unpack(found, self.packed, torch.float32) if self.packed else found.float()
        keys = keys.transpose(1, 2)
        weights = weights[piece.tokens].view(*queries.shape[:3], 1)
        scores = queries.new_zeros(*queries.shape[:2], keys.shape[2])
        for head in range(q.shape[1]):
            scores += (queries[:, :, head] @ keys).relu_() * weights[:, :, head]
        scores.masked_fill_(~piece.visible, -torch.inf)
        best = _order(scores).topk(min(self.spec.picks, scores.shape[-1]), -1).indices
        positions = best + piece.firsts[:, None, None]
        unseen = scores.gather(-1, best).isneginf()
        positions = positions.masked_fill(unseen, -1).sort(-1).values
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
        """Attend: q [R, Hq, Q, D], k [R, Hk, L, D], v [R, Hk, L, Dv] -> [R, Hq, Q, Dv]."""
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
        """Return partial attention [R, Hq, Q, Dv] and its log-sum-exp [R, Hq, Q], both fp32.

        Shapes are those of `_attend`, with visible: [R, Q, L].
        """
        folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]).float() * self.spec.scale
        scores = torch.matmul(folded, k.float().transpose(-1, -2))
        scores = scores.view(*q.shape[:3], -1)
        if self.spec.softcap:
            scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().nan_to_num_(0.0)
        result = torch.matmul(weights.view(*folded.shape[:3], -1), v.float())
        return result.view(*q.shape[:3], -1), lse

    def _attend_folded(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Attend with one query per row. Heads that share a key head become its queries, so keys
        and values are read once instead of repeated per head. Shapes are those of `_attend`.
        """
        rows, heads, _, size = q.shape
        queries = q.reshape(rows, k.shape[1], -1, size)
        result = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=visible, scale=self.spec.scale
        )
        return result.reshape(rows, heads, 1, -1)

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
        """Return how many of the `ends` cached tokens the last `queries` of them attend to."""
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
        """Build a piece of `queries` tokens of each of rows [R], from their tokens `first` [R]."""
        counts = np.diff(step.query_starts)[rows]
        before = step.context_lens[rows] - counts + first
        ends = before + queries if self.causal else step.context_lens[rows]
        tokens = (step.query_starts[rows] + first)[:, None] + np.arange(queries)
        if step.visible is not None:
            ends = np.maximum(step.visible[tokens[:, -1]].astype(np.int64), 1)
        length = int(self._reach(ends, queries).max())
        mask = _mask_in(step, rows, first, queries)
        spans = _spans_in(step, rows, before, queries) if queries > 1 and mask is None else ()
        if mask is not None:
            ends, length = step.context_lens[rows], int(step.context_lens[rows[0]])
        elif spans:
            far = max(int(ends[0]), *(end for _, end in spans))
            ends, length = np.array([far]), length + far - int(ends[0])
        keys = ends[:, None] - length + np.arange(length)
        blocks = step.block_tables[rows[:, None], np.maximum(keys, 0) // step.block_size]
        slots = blocks.astype(np.int64) * step.block_size + np.maximum(keys, 0) % step.block_size
        positions = before[:, None] + np.arange(queries)
        distance = positions[:, :, None] - keys[:, None, :]
        visible = np.broadcast_to(keys[:, None, :] >= 0, distance.shape)
        if step.visible is not None:
            visible = visible & (keys[:, None, :] < step.visible[tokens][:, :, None])
        elif mask is not None:
            visible = np.ones((1, queries, length), dtype=bool)
            visible[..., length - mask.shape[1] :] = mask
        elif self.causal:
            allowed = distance >= 0
            for begin, end in spans:
                inside = (positions >= begin) & (positions < end)
                allowed |= inside[:, :, None] & ((keys >= begin) & (keys < end))[:, None, :]
            visible = visible & allowed
        if self.spec.window is not None:
            back = distance if self.causal else np.abs(distance)
            visible = visible & (back < self.spec.window)
        indices = tokens.ravel().astype(np.int64)
        seen = visible.copy()
        return len(rows), indices, keys[:, 0].copy(), slots, distance.astype(np.int32), seen


def _order(scores: Tensor) -> Tensor:
    """Return int64 sort keys in the order of fp32 scores. Of equal scores (rectified heads often
    give zero) the earlier token has the larger key, so that picks do not depend on chunks.

    The low 29 bits of an fp32 score in fp64 are zero, which leaves room for the token's index.
    """
    keys = scores.double().view(torch.int64)
    keys = torch.where(keys < 0, keys ^ torch.iinfo(torch.int64).max, keys)
    low = (1 << 29) - 1
    return (keys & ~low) | (low - torch.arange(keys.shape[-1], device=keys.device))


def _mask_in(
    step: StepLayout, rows: np.ndarray, first: np.ndarray, queries: int
) -> np.ndarray | None:
    """Return [queries, tokens] bool: the row's tokens of the step that a piece's queries see.

    None without a mask. Only pieces with one row have one.
    """
    mask = step.masks.get(int(rows[0])) if step.masks and len(rows) == 1 else None
    return None if mask is None else mask[first[0] : first[0] + queries]


def _spans_in(
    step: StepLayout, rows: np.ndarray, before: np.ndarray, queries: int
) -> tuple[tuple[int, int], ...]:
    """Return (first, end) of spans that queries of a piece lie in; several rows have none."""
    if step.spans is None or len(rows) != 1:
        return ()
    first, last = int(before[0]), int(before[0]) + queries
    spans = step.spans[step.spans[:, 0] == rows[0], 1:].tolist()
    return tuple((begin, end) for begin, end in spans if begin < last and first < end)


def _padded(lengths: np.ndarray) -> np.ndarray:
    """Return the tokens that a piece of the first 1, 2, ... rows gathers; never decreases."""
    padded: np.ndarray = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
    return padded
