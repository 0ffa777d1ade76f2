"""Paged attention with FlashAttention 2 or 3.

Decode steps use `flash_attn_with_kvcache`, which splits long contexts; steps with prompts use the
variable-length function. Not run on hardware: written against the library's documented functions
and tested with a stand-in that checks its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import evolve, field, frozen
from attrs.validators import in_, optional
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
from modulm.structure import Problem, structure_table
from modulm_attention_flash_attn.library import Library, installed

__all__ = ["FlashAttention", "FlashOptions"]

_DTYPES = ("bfloat16", "float16")
#: Largest head size; version 2 needs block sizes that are multiples of this number of tokens.
_WIDEST, _PAGE = 256, 256
#: Platform capabilities that mark the chips for which each version has kernels.
_CHIPS = {2: ("sm80", "sm86", "sm87", "sm89", "sm90", "wave64"), 3: ("sm90",)}


@frozen
class FlashOptions:
    """`flash_attn_version`: 2 or 3. None picks 3 on chips that it has kernels for, else 2."""

    flash_attn_version: int | None = field(default=None, validator=optional(in_((2, 3))))


@frozen(eq=False)
class _StepPlan(AttentionPlan):
    """The step's layout on the device.

    blocks, offsets: [tokens] int64, where the step's keys are written. key_starts: [rows + 1]
    int32, cumulative context lengths. longest: the largest query length and the largest context
    length. single: every row has one token.
    """

    block_tables: Tensor
    query_starts: Tensor
    key_starts: Tensor
    context_lens: Tensor
    blocks: Tensor
    offsets: Tensor
    longest: tuple[int, int]
    single: bool

    def key(self) -> Hashable | None:
        return () if self.single else None

    def tensors(self) -> tuple[Tensor, ...]:
        return self.query_starts, self.key_starts, self.context_lens, self.blocks, self.offsets

    def tables(self) -> tuple[Tensor, ...]:
        return (self.block_tables,)

    def over(self, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> _StepPlan:
        names = ("query_starts", "key_starts", "context_lens", "blocks", "offsets")
        return evolve(self, block_tables=tables[0], **dict(zip(names, tensors, strict=True)))


class FlashAttention(AttentionBackend):
    """Cache [blocks, 2, block size, kv heads, head dim]: keys, then values."""

    name = "flash_attn"
    api = 3
    features = frozenset({"value_dim", "window", "softcap", "alibi", "causal"})
    #: The installed libraries by version; tests replace them.
    libraries: ClassVar[Mapping[int, Library | str] | None] = None

    def __init__(
        self,
        spec: AttentionSpec,
        platform: Platform,
        ops: Ops,
        block_size: int,
        options: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(spec, platform, ops, block_size, options)
        try:
            version = structure_table(options or {}, FlashOptions).flash_attn_version
        except Problem as error:
            raise ConfigError("attention.flash_attn", str(error)) from error
        library = self._library(spec, platform, version)
        if isinstance(library, str):
            raise ConfigError("attention_backend", f"flash_attn cannot run: {library}")
        if library.version == 2 and block_size % _PAGE:
            message = f"must be a multiple of {_PAGE} for FlashAttention 2, not {block_size}"
            raise ConfigError("block_size", message)
        self.library = library
        self.staging = platform.staging()
        self._settings: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": spec.causal,
            "window_size": _window(spec),
        }
        if spec.softcap:
            self._settings["softcap"] = spec.softcap

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        library = cls._library(spec, platform)
        return library if isinstance(library, str) else None

    @classmethod
    def _library(
        cls, spec: AttentionSpec, platform: Platform, version_setting: int | None = None
    ) -> Library | str:
        """Return the newest version that can run the layer here, or why none can."""
        reasons = []
        for version in (3, 2) if version_setting is None else (version_setting,):
            library = installed(version) if cls.libraries is None else cls.libraries[version]
            if isinstance(library, str):
                reasons.append(library)
                continue
            reason = _lacks(library, spec, platform)
            if reason is None:
                return library
            reasons.append(reason)
        return "; ".join(dict.fromkeys(reasons))

    @classmethod
    def block_sizes(cls, spec: AttentionSpec) -> tuple[int, ...]:
        return (_PAGE, 2 * _PAGE)

    def layout(self, blocks: int) -> KVLayout:
        spec = self.spec
        shape = (blocks, 2, self.block_size, spec.kv_heads, spec.head_dim)
        size = math.prod(shape[1:]) * getattr(torch, spec.kv_dtype).itemsize
        return KVLayout(shape, spec.kv_dtype, size)

    def plan(self, step: StepLayout) -> _StepPlan:
        counts = np.diff(step.query_starts)
        key_starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(step.context_lens, out=key_starts[1:])
        blocks, offsets = np.divmod(step.slots, self.block_size)
        sent = self.staging.send(
            (step.block_tables, step.query_starts, key_starts, step.context_lens, blocks, offsets)
        )
        longest = int(counts.max(initial=1)), int(step.context_lens.max(initial=1))
        return _StepPlan(*sent, longest, bool((counts == 1).all()))

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
        keys, values = cache[:, 0], cache[:, 1]
        keys[step.blocks, step.offsets] = k
        values[step.blocks, step.offsets] = v
        settings = dict(self._settings)
        if inputs.alibi is not None:
            settings["alibi_slopes"] = inputs.alibi
        out.copy_(self._attend(q, keys, values, step, settings))

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, step: _StepPlan, settings: dict[str, Any]
    ) -> Tensor:
        table = "block_table" if self.library.version == 2 else "page_table"
        settings[table] = step.block_tables
        result: Tensor
        if step.single:
            result = self.library.with_cache(
                q.unsqueeze(1), keys, values, cache_seqlens=step.context_lens, **settings
            )
            return result.squeeze(1)
        if self.library.version == 3:
            result = self.library.with_cache(
                q, keys, values, cache_seqlens=step.context_lens, cu_seqlens_q=step.query_starts,
                max_seqlen_q=step.longest[0], **settings,
            )  # fmt: skip
            return result
        result = self.library.varlen(
            q, keys, values, cu_seqlens_q=step.query_starts, cu_seqlens_k=step.key_starts,
            max_seqlen_q=step.longest[0], max_seqlen_k=step.longest[1], **settings,
        )  # fmt: skip
        return result


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Return the number of keys visible to the left and to the right of a query; -1 means all."""
    if spec.window is None:
        return (-1, -1)
    return (spec.window - 1, 0 if spec.causal else spec.window - 1)


def _lacks(library: Library, spec: AttentionSpec, platform: Platform) -> str | None:
    """Return the reason why this version cannot run the layer, or None."""
    who = f"FlashAttention {library.version}"
    if not platform.capabilities.intersection(_CHIPS[library.version]):
        return f"{who} has no kernels for the chip of platform {platform.name}"
    if spec.dtype not in _DTYPES:
        return f"{who} supports {' and '.join(_DTYPES)}, not {spec.dtype}"
    if spec.kv_dtype != spec.dtype:
        return f"{who} does not support a KV cache in {spec.kv_dtype}"
    if spec.value_dim not in (None, spec.head_dim):
        return f"{who} needs values as wide as keys, not {spec.value_dim} and {spec.head_dim}"
    if spec.head_dim > _WIDEST or spec.head_dim % 8:
        return (
            f"{who} needs head sizes that are multiples of 8 up to {_WIDEST}, not {spec.head_dim}"
        )
    if spec.alibi and library.version == 3:
        return f"{who} does not support ALiBi"
    if spec.alibi and spec.softcap:
        return f"{who} does not document the order of ALiBi and a softcap"
    if spec.softcap and not library.softcap:
        return f"{who} needs version 2.6 or later for a softcap"
    return None
