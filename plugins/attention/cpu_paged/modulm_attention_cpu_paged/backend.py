"""Paged attention with the compiled CPU kernels: one kernel serves prefill, decode and mixed steps.

The backend calls the kernels directly instead of through the op table, because the kernels define
the layout of the cache and `write_kv` and `paged_attention` in the table may come from another
provider. It is rejected when the model does not use these kernels for its other operations, for
example because they were switched off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType

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

__all__ = ["CpuPagedAttention"]

#: The provider in the op table whose package this backend calls.
_PROVIDER = "cpu"
#: e4m3 with a scale per token and head, which the kernels keep as bytes.
_SCALED_E4M3 = "fp8_per_token_head"
#: Features of layers that attend to selected tokens.
_SELECTED = {"selection", "latent", "softcap", "sinks", "scales"}
#: Features of layers whose steps may have masks: those that do not depend on distances.
_MASKED = {"masks", "value_dim", "softcap", "sinks", "latent", "scales", "spans"}


@cache
def _kernels() -> ModuleType | str:
    """Return the kernel package, or the reason why it cannot be used on this machine."""
    try:
        import modulm_kernels_cpu
    except ImportError as error:
        return str(error)
    return modulm_kernels_cpu


@frozen(eq=False)
class _StepPlan(AttentionPlan):
    """The arrays of a StepLayout as tensors that share their memory.

    work: [n] int32, how the kernel divides the step among threads; the same in every layer, empty
    for layers that select tokens or attend to selected ones. masks: [tokens] int64, the new tokens
    of its row that each one sees, a bit each; 0 in causal rows; None if all are. spans: the tokens
    of bidirectional spans as rows of their own; `tokens` holds their indices in the step. They are
    attended a second time, without the causal mask.
    """

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    slots: Tensor
    work: Tensor
    masks: Tensor | None = None
    tokens: Tensor | None = None
    spans: _StepPlan | None = None

    def key(self) -> tuple[()] | None:
        return () if self.spans is None else None

    def tensors(self) -> tuple[Tensor, ...]:
        tensors = self.query_starts, self.context_lens, self.slots, self.work
        return tensors if self.masks is None else (*tensors, self.masks)

    def tables(self) -> tuple[Tensor, ...]:
        return (self.block_tables,)

    def over(self, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> _StepPlan:
        return _StepPlan(*tables, *tensors)


class CpuPagedAttention(AttentionBackend):
    """Cache [blocks, kv heads, block size, width], in the layout of the CPU kernels.

    The cache may hold keys and values in int8, with one scale per token and head; queries and
    attention weights are then fixed-point numbers of 15 and 16 bits. It may also hold 8-bit floats
    with scale 1, or e4m3 with a scale per token and head; queries and attention weights are then
    rounded to bfloat16.
    """

    name = "cpu_paged"
    batch_invariant = True
    api = 3
    features = frozenset(
        {
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
        }
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
            raise ConfigError("attention.cpu_paged", f"takes no options, got {sorted(options)}")
        kernels = _kernels()
        if isinstance(kernels, str):
            raise ConfigError("attention_backend", f"cpu_paged cannot run: {kernels}")
        self.shape, self.copy_tokens = kernels.cache_shape, kernels.copy_tokens
        table = kernels.ops()
        self.write_kv, self.attend = table["write_kv"], table["paged_attention"]
        self.plan_step, self.prepare_qkv = table["plan_attention"], table["qkv_prepare"]
        self.pick, self.attend_selected = table["pick_tokens"], table["selected_attention"]

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        kernels = _kernels()
        if isinstance(kernels, str):
            return kernels
        if _PROVIDER not in ops.providers.values():
            return f"needs the kernels of {_PROVIDER}, but this model does not use them"
        if max(spec.head_dim, spec.value_dim or 0) > kernels.MAX_HEAD_SIZE:
            return f"supports head sizes up to {kernels.MAX_HEAD_SIZE}, not {spec.head_dim}"
        if spec.masks and (unsupported := spec.features - _MASKED):
            return f"cannot mask tokens of a step with {', '.join(sorted(unsupported))}"
        if spec.spans and spec.alibi:
            return "does not support ALiBi together with bidirectional spans"
        if (spec.latent or spec.picks) and spec.kv_dtype in ("int8", _SCALED_E4M3):
            return f"does not support a latent (MLA) cache or indexer keys in {spec.kv_dtype} yet"
        if spec.selection and (spec.selection > 1 or not spec.latent):
            return "supports selected tokens of a latent (MLA) cache, not selected runs or heads"
        if (spec.picks and (unsupported := spec.features - {"picks"})) or (
            spec.selection and (unsupported := spec.features - _SELECTED)
        ):
            return f"cannot select tokens with {', '.join(sorted(unsupported))}"
        dtypes = sorted(
            str(dtype).removeprefix("torch.").replace("uint8", _SCALED_E4M3)
            for dtype in kernels.CACHE_DTYPES
        )
        if spec.kv_dtype not in dtypes:
            return f"supports KV caches in {', '.join(dtypes)}, not {spec.kv_dtype}"
        return None

    @classmethod
    def block_sizes(cls, spec: AttentionSpec) -> tuple[int, ...]:
        return (32, 64, 96, 128, 256)

    def layout(self, blocks: int) -> KVLayout:
        spec = self.spec
        name = "uint8" if spec.kv_dtype == _SCALED_E4M3 else spec.kv_dtype
        dtype = getattr(torch, name)
        values = 0 if spec.latent or spec.picks else spec.value_dim
        shape = self.shape(blocks, spec.kv_heads, self.block_size, spec.head_dim, values, dtype)
        return KVLayout(shape, name, math.prod(shape[1:]) * dtype.itemsize)

    def plan(self, step: StepLayout) -> _StepPlan:
        if step.encoder_lens is not None:
            return self._plan(evolve(step, context_lens=step.encoder_lens), causal=False)
        plan = self._plan(step, self.spec.causal)
        if step.spans is None or not len(step.spans) or not self.spec.causal:
            return plan
        tokens, spans = _rows_of_spans(step)
        if not len(tokens):
            return plan
        span_plan = self._plan(spans, causal=False)
        return evolve(plan, tokens=torch.from_numpy(tokens), spans=span_plan)

    def _plan(self, step: StepLayout, causal: bool) -> _StepPlan:
        spec = self.spec
        starts = torch.from_numpy(step.query_starts)
        lengths = torch.from_numpy(step.context_lens)
        masks = _bits_of_masks(step) if step.masks else None
        return _StepPlan(
            torch.from_numpy(step.block_tables),
            starts,
            lengths,
            torch.from_numpy(step.slots),
            starts.new_empty(0)
            if spec.picks or spec.selection
            else self.plan_step(
                starts, lengths, spec.heads, spec.kv_heads, spec.window or 0, causal, masks
            ),
            masks,
        )

    def copy_slots(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        spec = self.spec
        values = 0 if spec.latent or spec.picks else spec.value_dim
        self.copy_tokens(cache, spec.head_dim, values, source, target)

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
        if inputs.k_scale is None and inputs.v_scale is None:
            if len(k):
                self.write_kv(k, v, cache, plan.slots)
            self._attend(q, cache, plan, out, inputs)
            return
        # The score q . (k s) equals (q s) . k, and the output is linear in the values.
        stored = torch.float32 if cache.itemsize == 1 else k.dtype  # 8-bit values are rounded once
        keys, values = (
            x.to(stored) if scale is None else (x.float() / scale[:, None]).to(stored)
            for x, scale in ((k, inputs.k_scale), (v, inputs.v_scale))
        )
        if len(k):
            self.write_kv(keys, values, cache, plan.slots)
        self._attend(_by_head(q, inputs.k_scale), cache, plan, out, inputs)
        out.copy_(_by_head(out, inputs.v_scale))

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
        if spec.latent or spec.picks or spec.value_dim not in (None, spec.head_dim):
            return False
        if inputs.k_scale is not None or inputs.v_scale is not None:
            return False
        q = self.prepare_qkv(
            qkv,
            prepare.q_norm,
            prepare.k_norm,
            prepare.eps,
            prepare.cos_sin,
            positions,
            plan.slots,
            cache,
            spec.heads,
            spec.kv_heads,
            prepare.neox,
            norm_offset=prepare.norm_offset,
        )
        self._attend(q, cache, plan, out, inputs)
        return True

    def _select(
        self, q: Tensor, cache: Tensor, plan: _StepPlan, out: Tensor, inputs: AttentionInputs
    ) -> None:
        """Select tokens, or attend to selected ones."""
        spec = self.spec
        where = cache, plan.block_tables, plan.query_starts, plan.context_lens, spec.scale
        if inputs.selected is None:
            self.pick(q, *where, inputs.head_weights, out)
        else:
            selected = inputs.selected.contiguous()
            self.attend_selected(q, *where, selected, out, spec.softcap, inputs.sinks)

    def _attend(
        self, q: Tensor, cache: Tensor, plan: _StepPlan, out: Tensor, inputs: AttentionInputs
    ) -> None:
        if inputs.head_weights is not None or inputs.selected is not None:
            self._select(q, cache, plan, out, inputs)
            return
        self._rows(q, cache, plan, out, inputs, self.spec.causal and not self.spec.cross)
        if plan.spans is not None:
            again = out.new_empty(len(plan.tokens), *out.shape[1:])  # type: ignore[arg-type]
            self._rows(q[plan.tokens], cache, plan.spans, again, inputs, causal=False)
            out[plan.tokens] = again

    def _rows(
        self,
        q: Tensor,
        cache: Tensor,
        plan: _StepPlan,
        out: Tensor,
        inputs: AttentionInputs,
        causal: bool,
    ) -> None:
        spec = self.spec
        self.attend(
            q,
            cache,
            plan.block_tables,
            plan.query_starts,
            plan.context_lens,
            spec.scale,
            out,
            spec.window or 0,
            spec.softcap,
            inputs.sinks,
            inputs.alibi,
            causal,
            plan.work,
            plan.masks,
        )


def _bits_of_masks(step: StepLayout) -> Tensor:
    """Return `_StepPlan.masks`. Raises ValueError for rows with too many new tokens."""
    kernels = _kernels()
    most = kernels.MOST_MASKED if isinstance(kernels, ModuleType) else 0
    table = np.zeros(int(step.query_starts[-1]), np.uint64)
    for row, mask in (step.masks or {}).items():
        count = mask.shape[1]
        if count > most:
            raise ValueError(
                f"masks: row {row} has {count} new tokens; the backend cpu_paged masks up to "
                f"{most}; draft fewer, or use --attention-backend sdpa"
            )
        bits = mask.astype(np.uint64) @ (np.uint64(1) << np.arange(count, dtype=np.uint64))
        table[step.query_starts[row] : step.query_starts[row + 1]] = bits
    return torch.from_numpy(table.view(np.int64))


def _rows_of_spans(step: StepLayout) -> tuple[np.ndarray, StepLayout]:
    """Return the indices of the step's tokens that lie in spans, and a layout of these tokens in
    which each span is a row that ends where the span ends.

    A sliding window reaches equally far in both directions here, since no span is longer than a
    window.
    """
    indices, counts, ends, rows = [], [], [], []
    for row, from_, end in step.spans.tolist() if step.spans is not None else ():
        begin = int(step.query_starts[row])
        start = int(step.context_lens[row]) - (int(step.query_starts[row + 1]) - begin)
        first = max(from_, start)
        if first < min(end, int(step.context_lens[row])):
            indices.append(np.arange(begin + first - start, begin + end - start))
            counts.append(end - first)
            ends.append(end)
            rows.append(row)
    tokens = np.concatenate(indices) if indices else np.zeros(0, np.int64)
    layout = StepLayout(
        step.block_size,
        np.ascontiguousarray(step.block_tables[rows]),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        np.array(ends, dtype=np.int32),
        step.slots[tokens],
    )
    return tokens, layout


def _by_head(x: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply x [tokens, heads, size] by the scale of the key head that each head attends to."""
    if scale is None:
        return x
    each = scale.repeat_interleave(x.shape[1] // len(scale)) if len(scale) > 1 else scale
    return (x.float() * each[:, None]).to(x.dtype)
