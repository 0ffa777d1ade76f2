"""Attention by the compiled CPU kernels: one kernel for prefill, decode and any mix of them.

The kernels own the layout of the cache, so this backend calls them directly and not through the
op table, whose `write_kv` and `paged_attention` may be another provider's. It stands aside where
the model does not run on these kernels otherwise: they may have been switched off.
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


@cache
def _kernels() -> ModuleType | str:
    """The kernel package, or why it cannot be used here."""
    try:
        import modulm_kernels_cpu
    except ImportError as error:
        return str(error)
    return modulm_kernels_cpu


@frozen(eq=False)
class _StepPlan(AttentionPlan):
    """The arrays of a StepLayout as tensors over the same memory.

    work: [n] int32, how the kernel cuts the step up, the same in every layer. spans: the step's
    tokens that see one another in both directions, as rows of their own, whose places are
    `tokens`; they are attended once more.
    """

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    slots: Tensor
    work: Tensor
    tokens: Tensor | None = None
    spans: _StepPlan | None = None

    def key(self) -> tuple[()] | None:
        return () if self.spans is None else None

    def tensors(self) -> tuple[Tensor, ...]:
        return self.query_starts, self.context_lens, self.slots, self.work

    def tables(self) -> tuple[Tensor, ...]:
        return (self.block_tables,)

    def over(self, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> _StepPlan:
        return _StepPlan(*tables, *tensors)


class CpuPagedAttention(AttentionBackend):
    """Cache [blocks, kv heads, block size, width], in the kernels' layout.

    Keys and values may also be kept in int8, with a scale for each token and head, under queries
    and weights in 15 and 16 bits of fixed point; or in 8-bit floats, whose scale is 1, under
    queries and weights rounded to bfloat16.
    """

    name = "cpu_paged"
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
        self.shape = kernels.cache_shape
        table = kernels.ops()
        self.write_kv, self.attend = table["write_kv"], table["paged_attention"]
        self.plan_step, self.prepare_qkv = table["plan_attention"], table["qkv_prepare"]

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        kernels = _kernels()
        if isinstance(kernels, str):
            return kernels
        if _PROVIDER not in ops.providers.values():
            return f"needs the kernels of provider {_PROVIDER}, which are not in use"
        if max(spec.head_dim, spec.value_dim or 0) > kernels.MAX_HEAD_SIZE:
            return f"takes heads of up to {kernels.MAX_HEAD_SIZE}, not {spec.head_dim}"
        if spec.spans and spec.alibi:
            return "has no alibi where tokens see those after them"
        if spec.latent and spec.kv_dtype == "int8":
            return "keeps no latent in int8, not yet"
        kept = sorted(str(dtype).removeprefix("torch.") for dtype in kernels.CACHE_DTYPES)
        if spec.kv_dtype not in kept:
            return f"keeps keys and values in {', '.join(kept)}, not {spec.kv_dtype}"
        return None

    @classmethod
    def block_sizes(cls, spec: AttentionSpec) -> tuple[int, ...]:
        return (32, 64, 96, 128, 256)

    def layout(self, blocks: int) -> KVLayout:
        spec = self.spec
        dtype = getattr(torch, spec.kv_dtype)
        values = 0 if spec.latent else spec.value_dim
        shape = self.shape(blocks, spec.kv_heads, self.block_size, spec.head_dim, values, dtype)
        return KVLayout(shape, spec.kv_dtype, math.prod(shape[1:]) * dtype.itemsize)

    def plan(self, step: StepLayout) -> _StepPlan:
        if step.encoder_lens is not None:
            return self._plan(evolve(step, context_lens=step.encoder_lens), causal=False)
        made = self._plan(step, self.spec.causal)
        if step.spans is None or not len(step.spans) or not self.spec.causal:
            return made
        tokens, spans = _rows_of_spans(step)
        if not len(tokens):
            return made
        both = self._plan(spans, causal=False)
        return evolve(made, tokens=torch.from_numpy(tokens), spans=both)

    def _plan(self, step: StepLayout, causal: bool) -> _StepPlan:
        spec = self.spec
        starts = torch.from_numpy(step.query_starts)
        lengths = torch.from_numpy(step.context_lens)
        return _StepPlan(
            torch.from_numpy(step.block_tables),
            starts,
            lengths,
            torch.from_numpy(step.slots),
            self.plan_step(starts, lengths, spec.heads, spec.kv_heads, spec.window or 0, causal),
        )

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
        # Scores are q . (k s) = (q s) . k, and what is attended is linear in the values.
        keys, values = _scaled(k, inputs.k_scale), _scaled(v, inputs.v_scale)
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
        if spec.latent or spec.value_dim not in (None, spec.head_dim):
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

    def _attend(
        self, q: Tensor, cache: Tensor, plan: _StepPlan, out: Tensor, inputs: AttentionInputs
    ) -> None:
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
        )


def _rows_of_spans(step: StepLayout) -> tuple[np.ndarray, StepLayout]:
    """Places of the step's tokens that lie in spans, and these tokens as a step: each span is a row
    that ends with it.

    A window reaches as far forward as back there: no span is longer than one.
    """
    places, counts, ends, rows = [], [], [], []
    for row, from_, end in step.spans.tolist() if step.spans is not None else ():
        begin = int(step.query_starts[row])
        start = int(step.context_lens[row]) - (int(step.query_starts[row + 1]) - begin)
        first = max(from_, start)
        if first < min(end, int(step.context_lens[row])):
            places.append(np.arange(begin + first - start, begin + end - start))
            counts.append(end - first)
            ends.append(end)
            rows.append(row)
    tokens = np.concatenate(places) if places else np.zeros(0, np.int64)
    layout = StepLayout(
        step.block_size,
        np.ascontiguousarray(step.block_tables[rows]),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        np.array(ends, dtype=np.int32),
        step.slots[tokens],
    )
    return tokens, layout


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Keys or values [tokens, kv heads, size] as they are kept."""
    return x if scale is None else (x.float() / scale[:, None]).to(x.dtype)


def _by_head(x: Tensor, scale: Tensor | None) -> Tensor:
    """x: [tokens, heads, size], times the scale of the key head that a head looks at."""
    if scale is None:
        return x
    each = scale.repeat_interleave(x.shape[1] // len(scale)) if len(scale) > 1 else scale
    return (x.float() * each[:, None]).to(x.dtype)
