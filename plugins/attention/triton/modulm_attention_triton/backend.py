"""Paged attention with the Triton kernels: prompts are tiled over queries, decodes over keys.

The backend calls the kernels directly instead of through the op table, because the kernels define
the layout of the cache. It is rejected when the model does not use these kernels for its other
operations.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.attention import (
    PLAIN,
    AttentionBackend,
    AttentionInputs,
    AttentionPlan,
    AttentionSpec,
    KVLayout,
    QKVPrepare,
    StepLayout,
)
from modulm.contracts.ops import Ops
from modulm.contracts.platform import Platform
from modulm.errors import ConfigError
from modulm_attention_triton.work import bits_of_each, prompt_tiles, span_of_each, split_tiles

if TYPE_CHECKING:
    from modulm_kernels_triton.paged_attention import Work
    from modulm_kernels_triton.pick_tokens import SparseWork

__all__ = ["TritonAttention"]

#: The provider in the op table whose package this backend calls.
_PROVIDER = "triton"
_NAMES = ("query_starts", "context_lens", "key_lens", "prompts", "splits", "few")
_SPARSE_NAMES = ("rows", "positions", "few", "many")
#: Features of layers that attend to selected tokens.
_SELECTED = {"selection", "latent", "scales"}
#: Features supported with masks: those that do not depend on the distance between tokens.
_MASKED = {"masks", "value_dim", "softcap", "sinks", "latent", "scales"}
_FLOATS = ("bfloat16", "float16", "float32")
#: Formats with scales of their own, and the dtype of their numbers.
_SCALED = {
    "int8": "int8", "fp8_per_token_head": "float8_e4m3fn", "nvfp4": "uint8",
    "nvfp4_4over6": "uint8", "fp8_ds_mla": "uint8", "nvfp4_ds_mla": "uint8",
}  # fmt: skip
#: Formats of latents, and the sizes of latent and key that they store.
_LATENTS, _LATENT_SIZES = ("fp8_ds_mla", "nvfp4_ds_mla"), (512, 576)
#: The format with scales that indexer keys may have.
_INDEXER = "fp8_per_token_head"
_NARROW = ("float8_e4m3fn", "float8_e5m2", *_SCALED)
#: Largest head size: a latent of 512 and a rotated part of 64.
_WIDEST = 576


@cache
def _kernels() -> ModuleType | str:
    """Return the host side of the kernels, or the reason why they cannot be used here."""
    try:
        from modulm_kernels_triton import paged
    except ImportError as error:
        return str(error)
    return paged


@frozen(eq=False)
class _StepPlan(AttentionPlan):
    """`work` for the kernels and the cache slots of the step's keys, on the device.

    names: the fields of `work` besides `block_tables`.
    """

    work: Work | SparseWork
    slots: Tensor
    names: tuple[str, ...]

    def key(self) -> Hashable:
        return ()

    def tensors(self) -> tuple[Tensor, ...]:
        return (*(getattr(self.work, name) for name in self.names), self.slots)

    def tables(self) -> tuple[Tensor, ...]:
        return (self.work.block_tables,)

    def over(self, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> _StepPlan:
        *others, slots = tensors
        changed = dict(zip(self.names, others, strict=True))
        return evolve(self, work=evolve(self.work, block_tables=tables[0], **changed), slots=slots)


class TritonAttention(AttentionBackend):
    """Cache [blocks, kv heads, numbers], in which a token's key is adjacent to its value.

    The cache may hold 8-bit floats, with or without a scale per layer, or int8 and e4m3 with a
    scale per token and head. The result of a row does not depend on other rows.
    """

    name = "triton"
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
            "spans",
            "cross",
            "selection",
            "picks",
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
        if options:
            raise ConfigError("attention.triton", f"takes no options, got {sorted(options)}")
        kernels = _kernels()
        if isinstance(kernels, str):
            raise ConfigError("attention_backend", f"triton cannot run: {kernels}")
        self.staging = platform.staging()
        self.kernels = kernels
        values = spec.latent or spec.value_dim or spec.head_dim
        kept = _SCALED.get(spec.kv_dtype, spec.kv_dtype)
        cache_dtype, dtype = getattr(torch, kept), getattr(torch, spec.dtype)
        self.is_sparse = bool(spec.picks or spec.selection)
        self.form = kernels.CacheForm(
            1 if spec.latent else spec.kv_heads, block_size, spec.head_dim, values, cache_dtype,
            bool(spec.latent or spec.picks),
            spec.kv_dtype if spec.kv_dtype in kernels.CODES else "",
        )  # fmt: skip
        self.look = kernels.Look(
            spec.causal and not spec.cross, 0 if spec.cross else spec.window or 0, spec.softcap,
            spec.spans,
        )  # fmt: skip
        group = spec.heads // self.form.kv_heads
        self.prompt_tokens = kernels.queries_of_a_tile("prompt", group, self.form, dtype)[0]
        self.split_tokens = kernels.queries_of_a_tile("split", group, self.form, dtype)[0]

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        if _PROVIDER not in ops.providers.values():
            return f"needs the kernels of {_PROVIDER}, but this model does not use them"
        kernels = _kernels()
        if isinstance(kernels, str):
            return kernels
        if spec.dtype not in _FLOATS:
            return f"supports {', '.join(_FLOATS)}, not {spec.dtype}"
        if spec.kv_dtype != spec.dtype and spec.kv_dtype not in _NARROW:
            return f"supports KV caches in the model's dtype or {', '.join(_NARROW)}, not in " + (
                spec.kv_dtype
            )
        if spec.kv_dtype in _LATENTS:
            if (spec.latent, spec.head_dim) != _LATENT_SIZES or spec.scales:
                return (
                    f"{spec.kv_dtype} stores latents (MLA) of 512 with a rotated part of 64 only, "
                    "without scales per layer"
                )
        elif spec.kv_dtype in _SCALED and (spec.latent or spec.scales):
            return f"does not support a latent (MLA) cache or scales per layer in {spec.kv_dtype}"
        if spec.picks and spec.kv_dtype in _SCALED and spec.kv_dtype != _INDEXER:
            return f"does not support indexer keys in {spec.kv_dtype}"
        if spec.masks and (unsupported := spec.features - _MASKED):
            return f"cannot mask tokens of a step with {', '.join(sorted(unsupported))}"
        if spec.selection and (spec.selection > 1 or not spec.latent):
            return "supports selected tokens of a latent (MLA) cache, not selected runs or heads"
        if (spec.picks and (unsupported := spec.features - {"picks"})) or (
            spec.selection and (unsupported := spec.features - _SELECTED)
        ):
            return f"cannot select tokens with {', '.join(sorted(unsupported))}"
        if spec.kv_dtype in _SCALED and (spec.head_dim + (spec.value_dim or spec.head_dim)) % 4:
            return f"needs even head sizes for {spec.kv_dtype}, not {spec.head_dim}"
        whole_groups = spec.head_dim % 16 == (spec.value_dim or 0) % 16 == 0
        if spec.kv_dtype in ("nvfp4", "nvfp4_4over6") and not whole_groups:
            return f"needs head sizes that 16 divides for {spec.kv_dtype}, not {spec.head_dim}"
        if max(spec.head_dim, spec.value_dim or 0) > _WIDEST:
            return f"supports head sizes up to {_WIDEST}, not {spec.head_dim}"
        reason: str | None = kernels.unreadable(_SCALED.get(spec.kv_dtype, spec.kv_dtype))
        return reason

    @classmethod
    def block_sizes(cls, spec: AttentionSpec) -> tuple[int, ...]:
        return (16, 32, 64, 128, 256)

    def layout(self, blocks: int) -> KVLayout:
        shape = self.form.shape(blocks)
        each = math.prod(shape[1:]) * self.form.dtype.itemsize
        return KVLayout(shape, str(self.form.dtype).removeprefix("torch."), each)

    def plan(self, step: StepLayout) -> _StepPlan:
        if self.is_sparse:
            return self._sparse_plan(step)
        starts = step.query_starts
        counts = np.diff(starts)
        is_short = counts <= self.kernels.FEW
        spans = None
        if step.spans is not None and self.spec.spans:
            is_short[step.spans[:, 0]] = False
            spans = span_of_each(step.spans, starts, step.context_lens)
        if step.masks:
            is_short[list(step.masks)] = False
            spans = bits_of_each(step.masks, starts, step.context_lens)
        splits, split_tokens = split_tiles(
            starts, np.flatnonzero(is_short & (counts > 0)), self.split_tokens
        )
        prompts = prompt_tiles(starts, np.flatnonzero(~is_short), self.prompt_tokens)
        key_lens = step.context_lens if step.encoder_lens is None else step.encoder_lens
        arrays = [
            starts,
            step.context_lens,
            key_lens,
            prompts,
            splits,
            split_tokens,
            step.block_tables,
        ]
        staged = self.staging.send([*arrays, step.slots, *([] if spans is None else [spans])])
        *others, table, slots = staged[: len(arrays) + 1]
        around = staged[-1] if spans is not None else None
        names = _NAMES if around is None else (*_NAMES, "spans")
        return _StepPlan(self.kernels.Work(table, *others, around), slots, names)

    def _sparse_plan(self, step: StepLayout) -> _StepPlan:
        counts = np.diff(step.query_starts)
        rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        shifts = step.context_lens - step.query_starts[1:]
        positions = np.arange(len(rows), dtype=np.int32) + shifts[rows]
        is_short = (counts <= self.kernels.FEW)[rows]
        few, many = (np.flatnonzero(some).astype(np.int32) for some in (is_short, ~is_short))
        arrays = [step.block_tables, rows, positions.astype(np.int32), few, many, step.slots]
        *work, slots = self.staging.send(arrays)
        return _StepPlan(self.kernels.SparseWork(*work), slots, _SPARSE_NAMES)

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
        scales = inputs.k_scale, inputs.v_scale
        self.kernels.write_kv(k, v, cache, self.form, plan.slots, *scales)
        where = q, cache, self.form, plan.work, self.spec.scale
        if inputs.head_weights is not None:
            self.kernels.pick_tokens(*where, inputs.head_weights.contiguous(), out)
        elif inputs.selected is not None:
            self.kernels.selected_attention(*where, inputs.selected.contiguous(), out, *scales)
        else:
            self._attend(q, cache, plan, out, inputs)

    def forward_qkv(
        self,
        qkv: Tensor,
        positions: Tensor,
        prepare: QKVPrepare,
        cache: Tensor,
        plan: _StepPlan,
        out: Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> bool:
        spec = self.spec
        if spec.latent or spec.cross or spec.picks or spec.value_dim not in (None, spec.head_dim):
            return False
        if (prepare.q_norm is None) != (prepare.k_norm is None):
            return False
        q = self.kernels.qkv_prepare(
            qkv,
            prepare.q_norm,
            prepare.k_norm,
            prepare.eps,
            prepare.cos_sin,
            positions,
            plan.slots,
            cache,
            self.form,
            spec.heads,
            prepare.neox,
            prepare.norm_offset,
            inputs.k_scale,
            inputs.v_scale,
        )
        self._attend(q, cache, plan, out, inputs)
        return True

    def copy_slots(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        form, size = self.form, self.form.block_size
        parts = [cache[:, :, : form.scales_at].unflatten(2, (size, form.token))]
        if form.has_scales:
            parts.append(cache[:, :, form.scales_at :].unflatten(2, (size, -1)))
        for part in parts:
            part[target // size, :, target % size] = part[source // size, :, source % size]

    def _attend(
        self, q: Tensor, cache: Tensor, plan: _StepPlan, out: Tensor, inputs: AttentionInputs
    ) -> None:
        self.kernels.paged_attention(
            q, cache, self.form, plan.work, self.spec.scale, out, self.look, inputs.sinks,
            inputs.alibi, inputs.k_scale, inputs.v_scale,
        )  # fmt: skip
