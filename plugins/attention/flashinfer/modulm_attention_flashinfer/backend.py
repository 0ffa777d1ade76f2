"""Paged attention with FlashInfer's wrappers (arXiv 2501.01005).

A wrapper plans each step on the host, so attention cannot be part of a recorded graph; it runs
between the recorded pieces. Not run on hardware: written against the library's documented functions
and tested with a stand-in that checks its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

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
from modulm.errors import ConfigError

__all__ = ["FlashInferAttention"]

_DTYPES = ("bfloat16", "float16")
_HEADS = (64, 128, 256)
#: Platform capabilities that mark the chips with kernels.
_CHIPS = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm120")
#: Number of wrappers used in turn: one may still be running while the next step is planned.
_TURNS = 4
#: Bytes of a wrapper's workspace, as its documentation recommends.
_WORKSPACE = 128 << 20


@cache
def _installed() -> Any:
    """Return the library, or the reason why it cannot be used."""
    try:
        return import_module("flashinfer")
    except (ImportError, OSError) as error:
        return f"FlashInfer is not installed ({error})"


@frozen(eq=False)
class _StepPlan(AttentionPlan):
    """blocks, offsets: [tokens] int64, where keys are written. wrapper: the one that planned the
    step.
    """

    blocks: Tensor
    offsets: Tensor
    wrapper: Any


class FlashInferAttention(AttentionBackend):
    """Cache [blocks, 2, block size, kv heads, head dim]: keys, then values ("NHD")."""

    name = "flashinfer"
    api = 3
    features = frozenset({"value_dim", "window", "softcap", "causal"})
    #: The installed library; tests replace it.
    library: Any = None

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
            raise ConfigError("attention.flashinfer", f"takes no options, got {sorted(options)}")
        library = self.library or _installed()
        if isinstance(library, str):
            raise ConfigError("attention_backend", f"flashinfer cannot run: {library}")
        self.staging = platform.staging()
        space = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=platform.device)
        decode = library.BatchDecodeWithPagedKVCacheWrapper
        prefill = library.BatchPrefillWithPagedKVCacheWrapper
        self._decode = [decode(space, "NHD") for _ in range(_TURNS)]
        self._prefill = [prefill(space, "NHD") for _ in range(_TURNS)]
        self._turn = 0

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        library = cls.library or _installed()
        if isinstance(library, str):
            return library
        if not platform.capabilities.intersection(_CHIPS):
            return f"has no kernels for the chip of platform {platform.name}"
        if spec.dtype not in _DTYPES:
            return f"supports {' and '.join(_DTYPES)}, not {spec.dtype}"
        if spec.kv_dtype != spec.dtype:
            return f"does not support a KV cache in {spec.kv_dtype}"
        if spec.value_dim not in (None, spec.head_dim):
            return f"needs values as wide as keys, not {spec.value_dim} and {spec.head_dim}"
        if spec.head_dim not in _HEADS:
            return f"supports head sizes {', '.join(map(str, _HEADS))}, not {spec.head_dim}"
        if spec.window is not None and not spec.causal:
            return "does not support a sliding window without a causal mask"
        return None

    def layout(self, blocks: int) -> KVLayout:
        spec = self.spec
        shape = (blocks, 2, self.block_size, spec.kv_heads, spec.head_dim)
        size = math.prod(shape[1:]) * getattr(torch, spec.kv_dtype).itemsize
        return KVLayout(shape, spec.kv_dtype, size)

    def plan(self, step: StepLayout) -> _StepPlan:
        counts = np.diff(step.query_starts)
        lengths = np.maximum(step.context_lens, 1)
        pages = -(-lengths // self.block_size)
        starts = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        in_use = np.arange(step.block_tables.shape[1]) < pages[:, None]
        last = ((lengths - 1) % self.block_size + 1).astype(np.int32)
        blocks, offsets = np.divmod(step.slots, self.block_size)
        staged = self.staging.send((blocks, offsets, step.block_tables[in_use]))
        table = (torch.from_numpy(starts), staged[2], torch.from_numpy(last))
        spec, dtype = self.spec, getattr(torch, self.spec.dtype)
        shape = (spec.heads, spec.kv_heads, spec.head_dim, self.block_size)
        settings = {
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.softcap or None,
            "sm_scale": spec.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._turn = (self._turn + 1) % _TURNS
        if (counts == 1).all():
            wrapper = self._decode[self._turn]
            wrapper.plan(*table, *shape, **settings)
            return _StepPlan(staged[0], staged[1], wrapper)
        wrapper = self._prefill[self._turn]
        queries = torch.from_numpy(step.query_starts.copy())
        wrapper.plan(queries, *table, *shape, causal=spec.causal, **settings)
        return _StepPlan(staged[0], staged[1], wrapper)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        plan: Any,
        out: Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> None:
        step: _StepPlan = plan
        cache[step.blocks, 0, step.offsets] = k
        cache[step.blocks, 1, step.offsets] = v
        out.copy_(step.wrapper.run(q, cache))
