"""Reference paged attention, row by row in plain torch, for comparison with every backend.

A layer's cache is a tensor [blocks, block size, kv_heads, head_dim + value_dim] with a token's key
beside its value. A latent cache is [blocks, block size, 1, head_dim], and its values are the first
entries of its keys; the cache of a layer that picks tokens has no values.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import cast

import torch
from attrs import field, frozen
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
from modulm.ops import twins

__all__ = [
    "ReferenceAttention",
    "ReferencePlan",
    "attend",
    "paged_attention",
    "pick",
    "pick_scores",
    "qkv_prepare",
    "write_kv",
]


@frozen(eq=False)
class ReferencePlan(AttentionPlan):
    """A StepLayout as tensors; `spans` [n, 3], `encoder_lens` [rows], `seen` [tokens] or None;
    `masks` as there.
    """

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    slots: Tensor
    spans: Tensor | None = None
    encoder_lens: Tensor | None = None
    seen: Tensor | None = None
    masks: Mapping[int, Tensor] = field(factory=dict, kw_only=True)

    @classmethod
    def of(cls, step: StepLayout, device: torch.device) -> ReferencePlan:
        """Copy the layout to a device."""
        arrays = (step.block_tables, step.query_starts, step.context_lens, step.slots)
        more = (step.spans, step.encoder_lens, step.visible)
        return cls(
            *(torch.from_numpy(array).to(device) for array in arrays),
            *(None if array is None else torch.from_numpy(array).to(device) for array in more),
            masks={
                row: torch.from_numpy(mask).to(device) for row, mask in (step.masks or {}).items()
            },
        )

    def key(self) -> Hashable:
        if self.masks:
            return None
        return tuple(tensor is None for tensor in self._more)

    def tensors(self) -> tuple[Tensor, ...]:
        listed = (self.query_starts, self.context_lens, self.slots, *self._more)
        return tuple(tensor for tensor in listed if tensor is not None)

    @property
    def _more(self) -> tuple[Tensor | None, ...]:
        return self.spans, self.encoder_lens, self.seen

    def tables(self) -> tuple[Tensor, ...]:
        return (self.block_tables,)

    def over(self, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> ReferencePlan:
        remaining = iter(tensors)
        required = (next(remaining), next(remaining), next(remaining))
        more = (None if tensor is None else next(remaining) for tensor in self._more)
        return ReferencePlan(tables[0], *required, *more)


class ReferenceAttention(AttentionBackend):
    """A slow backend with every feature of the contract, for caches in floats."""

    name = "reference"
    api = 3
    features = frozenset(
        [
            "value_dim",
            "window",
            "softcap",
            "sinks",
            "alibi",
            "causal",
            "latent",
            "scales",
            "selection",
            "spans",
            "cross",
            "picks",
            "biases",
            "partial",
            "masks",
        ]
    )

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        dtype = getattr(torch, spec.kv_dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return f"supports KV caches in floats, not {spec.kv_dtype}"
        return None

    def layout(self, blocks: int) -> KVLayout:
        spec = self.spec
        values = 0 if spec.latent or spec.picks else spec.value_dim or spec.head_dim
        width = spec.head_dim + values
        shape = (blocks, self.block_size, spec.kv_heads, width)
        size = prod(shape[1:]) * getattr(torch, spec.kv_dtype).itemsize
        return KVLayout(shape, spec.kv_dtype, size)

    def plan(self, step: StepLayout) -> ReferencePlan:
        return ReferencePlan.of(step, self.platform.device)

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
        step = cast("ReferencePlan", plan)
        if inputs.k_scale is not None and inputs.v_scale is not None:
            k, v = k / inputs.k_scale[:, None], v / inputs.v_scale[:, None]
        write_kv(k, v, cache, step.slots)
        if self.spec.picks:
            pick(self.spec, q, cache, step, out, inputs)
        else:
            attend(self.spec, q, cache, step, out, inputs)

    def copy_slots(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        slots = cache.view(-1, *cache.shape[2:])
        slots[target] = slots[source]


def write_kv(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write keys [tokens, kv_heads, head_dim] and values to their slots [tokens] int64.

    Values are ignored if the cache is as wide as a key (a latent cache).
    """
    flat = cache.view(-1, *cache.shape[2:])
    size = k.shape[-1]
    flat[slots, :, :size] = k.to(cache.dtype)
    if cache.shape[-1] > size:
        flat[slots, :, size:] = v.to(cache.dtype)


def paged_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Call `attend` with the arguments that kernels take; window 0 means none."""
    spec = AttentionSpec(
        q.shape[1],
        cache.shape[2],
        q.shape[2],
        scale,
        str(q.dtype),
        str(cache.dtype),
        window=window or None,
        softcap=softcap,
        causal=causal,
    )
    plan = ReferencePlan(block_tables, query_starts, context_lens, query_starts)
    return attend(spec, q, cache, plan, out, AttentionInputs(sinks=sinks, alibi=alibi))


def attend(
    spec: AttentionSpec,
    q: Tensor,
    cache: Tensor,
    plan: ReferencePlan,
    out: Tensor,
    inputs: AttentionInputs = PLAIN,
) -> Tensor:
    """Fill `out` from a cache that already holds the step's keys; shapes as in the contract."""
    starts = plan.query_starts.tolist()
    ends = plan.context_lens if plan.encoder_lens is None else plan.encoder_lens
    for row, length in enumerate(ends.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.start == tokens.stop:
            continue
        blocks = plan.block_tables[row][: -(-length // cache.shape[1])].long()
        entries = cache[blocks].flatten(0, 1)[:length].float()
        keys, values = entries[..., : q.shape[2]], entries[..., q.shape[2] :]
        if entries.shape[2] == q.shape[2]:
            values = entries[..., : out.shape[2]]
        if inputs.k_scale is not None and inputs.v_scale is not None:
            keys, values = keys * inputs.k_scale[:, None], values * inputs.v_scale[:, None]
        group = q.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float() * spec.scale, keys)
        if spec.softcap > 0:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        last = int(plan.context_lens[row])
        queries = torch.arange(last - (tokens.stop - tokens.start), last, device=q.device)
        distance = queries[:, None] - torch.arange(length, device=q.device)
        if inputs.alibi is not None:
            scores -= inputs.alibi[:, None, None] * distance
        if inputs.biases is not None:
            scores += inputs.biases[:, distance.clamp(0, inputs.biases.shape[1] - 1)]
        visible = _visible(spec, plan, row, distance)
        if inputs.selected is not None:
            visible = visible & _selected(spec, inputs.selected[tokens], length, q.shape[1])
        scores = scores.masked_fill(~visible, -torch.inf)
        if inputs.sinks is not None:
            column = inputs.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, column], dim=-1)
        if inputs.lse is not None:
            inputs.lse[tokens] = scores.logsumexp(-1).transpose(0, 1)
        weights = scores.softmax(-1)[..., :length].nan_to_num(0.0)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out


def pick(
    spec: AttentionSpec,
    q: Tensor,
    cache: Tensor,
    plan: ReferencePlan,
    out: Tensor,
    inputs: AttentionInputs,
) -> Tensor:
    """Fill `out` [tokens, 1, picks] for a spec that picks tokens; the cache holds the step's
    keys.
    """
    starts = plan.query_starts.tolist()
    for row in range(len(starts) - 1):
        tokens = slice(starts[row], starts[row + 1])
        scores = pick_scores(spec, q, cache, plan, row, inputs)
        best = scores.topk(min(spec.picks, scores.shape[1]), -1)
        positions = best.indices.masked_fill(best.values.isneginf(), -1).sort(-1).values
        out[tokens] = -1
        out[tokens, 0, spec.picks - positions.shape[1] :] = positions.to(out.dtype)
    return out


def pick_scores(
    spec: AttentionSpec,
    q: Tensor,
    cache: Tensor,
    plan: ReferencePlan,
    row: int,
    inputs: AttentionInputs,
) -> Tensor:
    """Return the selection scores of one row's queries: [queries, keys] fp32, -inf for invisible
    keys.
    """
    weights = inputs.head_weights
    if weights is None:
        raise ValueError("a layer that picks tokens must pass head_weights")
    tokens = slice(*plan.query_starts[row : row + 2].tolist())
    length = int(plan.context_lens[row])
    blocks = plan.block_tables[row][: -(-length // cache.shape[1])].long()
    keys = cache[blocks].flatten(0, 1)[:length, 0].float()
    meeting = torch.einsum("qhd,kd->qhk", q[tokens].float() * spec.scale, keys).relu()
    scores = torch.einsum("qh,qhk->qk", weights[tokens], meeting)
    queries = torch.arange(length - len(scores), length, device=q.device)
    later = torch.arange(length, device=q.device) > queries[:, None]
    return scores.masked_fill(later, -torch.inf)


def _visible(spec: AttentionSpec, plan: ReferencePlan, row: int, distance: Tensor) -> Tensor:
    """Return [queries, keys] bool of one row. distance: query position minus key position."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if spec.cross:
        return visible
    if plan.seen is not None:
        first, end = plan.query_starts[row : row + 2].tolist()
        keys = torch.arange(distance.shape[1], device=distance.device)
        return keys < plan.seen[first:end, None]
    if row in plan.masks:
        mask = plan.masks[row]
        visible[:, -len(mask) :] = mask
        return visible
    if spec.causal:
        visible &= distance >= 0
    if spec.window is not None:
        visible &= distance.abs() < spec.window
    keys = torch.arange(distance.shape[1], device=distance.device)
    queries = distance[:, :1] + keys[:1]
    for span_row, first, end in () if plan.spans is None else plan.spans.tolist():
        if span_row == row:
            inside = [(first <= at) & (at < end) for at in (queries, keys)]
            visible |= inside[0] & inside[1]
    return visible


def _selected(spec: AttentionSpec, selected: Tensor, length: int, heads: int) -> Tensor:
    """Return [heads, queries, keys] bool. selected: [queries, kv_heads or 1, n]."""
    runs = torch.arange(length, device=selected.device) // spec.selection
    chosen = (selected.unsqueeze(-1) == runs).any(2).transpose(0, 1)
    return chosen.repeat_interleave(heads // len(chosen), 0)


def qkv_prepare(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    heads: int,
    kv_heads: int,
    neox: bool = True,
    norm_offset: float = 0.0,
) -> Tensor:
    """Do what `AttentionBackend.forward_qkv` does before attention, in plain torch.

    Split, normalise per head, rotate, and write keys and values to the cache; returns the queries.
    qkv: [T, (Hq + 2 Hk) D]; q_norm, k_norm: [D]; cos_sin: None for no rotation -> [T, Hq, D].
    """
    size = qkv.shape[-1] // (heads + 2 * kv_heads)
    q, k, v = torch.split(torch.unflatten(qkv, -1, (-1, size)), [heads, kv_heads, kv_heads], dim=1)
    q = q.clone() if q_norm is None else twins.rms_norm(q, q_norm, eps, offset=norm_offset)
    k = k.clone() if k_norm is None else twins.rms_norm(k, k_norm, eps, offset=norm_offset)
    if cos_sin is not None:
        twins.rotary(q, k, positions, cos_sin, neox)
    write_kv(k, v, cache, slots)
    return q
