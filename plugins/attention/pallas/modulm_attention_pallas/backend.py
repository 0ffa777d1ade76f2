"""Paged attention with the Pallas kernels, or with XLA's operations on CPUs.

JAX is imported when a backend is created, never with this module.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    StepLayout,
)
from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.contracts.ops import Ops
    from modulm.contracts.platform import Platform

__all__ = ["PallasAttention"]

_FLOATS = ("bfloat16", "float32")
_NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
#: Rows of a block of an int8 cache beside those of its tokens.
_SCALE_ROWS = 4


@frozen(eq=False)
class _StepPlan(AttentionPlan):
    """The arrays of `Tiles` and the slots, and the block table."""

    arrays: tuple[Tensor, ...]
    table: Tensor

    def key(self) -> Hashable:
        return "pallas"

    def tensors(self) -> tuple[Tensor, ...]:
        return self.arrays

    def tables(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def over(self, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> _StepPlan:
        return evolve(self, arrays=tuple(tensors), table=tables[0])


class PallasAttention(AttentionBackend):
    """Cache [blocks, kv heads, block size, size of keys + size of values]. In int8, blocks have
    four more rows for scales.

    Shapes depend only on the rows and tokens of a step and the width of its block table.
    """

    name = "pallas"
    api = 3
    features = frozenset(["value_dim", "window", "softcap", "sinks", "causal", "latent", "scales"])

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
            raise ConfigError("attention.pallas", f"takes no options, got {sorted(options)}")
        import jax

        from modulm_kernels_pallas.paged_attention import Look

        self._compiled = jax.jit(self._run)
        values = spec.latent or spec.value_dim or spec.head_dim
        self.look = Look(
            spec.head_dim, values, spec.scale, spec.causal, spec.window or 0, spec.softcap,
            bool(spec.latent),
        )  # fmt: skip

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        if "jax" not in platform.capabilities:
            return "runs in programs of JAX only"
        if spec.dtype not in _FLOATS:
            return f"supports {', '.join(_FLOATS)}, not {spec.dtype}"
        if spec.kv_dtype != spec.dtype and spec.kv_dtype not in _NARROW:
            return (
                f"supports KV caches in the model's dtype or {', '.join(_NARROW)}, not in "
                f"{spec.kv_dtype}"
            )
        if spec.window and not spec.causal:
            return "does not support a window in both directions"
        return None

    @classmethod
    def block_sizes(cls, spec: AttentionSpec) -> tuple[int, ...]:
        sizes = (16, 32, 64, 128, 256)
        if spec.kv_dtype != "int8":
            return sizes
        # A block's scales are rows as wide as keys and values.
        width = spec.head_dim + (0 if spec.latent else spec.value_dim or spec.head_dim)
        return tuple(size for size in sizes if size <= width)

    def layout(self, blocks: int) -> KVLayout:
        spec = self.spec
        heads = 1 if spec.latent else spec.kv_heads
        width = spec.head_dim + (0 if spec.latent else self.look.values)
        rows = self.block_size + (_SCALE_ROWS if spec.kv_dtype == "int8" else 0)
        shape = (blocks, heads, rows, width)
        size = math.prod(shape[1:]) * getattr(torch, spec.kv_dtype).itemsize
        return KVLayout(shape, spec.kv_dtype, size)

    def plan(self, step: StepLayout) -> _StepPlan:
        from modulm_kernels_pallas.tiles import tiles_of

        tiles = tiles_of(
            step.query_starts, step.context_lens, self.block_size,
            causal=self.spec.causal, window=self.spec.window or 0,
        )  # fmt: skip
        arrays = (*tiles.arrays(), step.slots)
        return _StepPlan(
            tuple(torch.from_numpy(array) for array in arrays), torch.from_numpy(step.block_tables)
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
        from modulm_kernels_pallas import bridge
        from modulm_kernels_pallas.paged_attention import Work
        from modulm_kernels_pallas.spread import current_mesh

        def optional(tensor: Tensor | None) -> Any:
            return None if tensor is None else bridge.array_of(tensor)

        *tiles, slots = (bridge.array_of(array) for array in plan.arrays)
        work = Work(bridge.array_of(plan.table), *tiles)
        arguments = (
            bridge.array_of(q), bridge.array_of(k), bridge.array_of(v), bridge.array_of(cache),
            work, slots, optional(inputs.sinks), optional(inputs.k_scale), optional(inputs.v_scale),
        )  # fmt: skip
        result, written = (self._compiled if current_mesh() is None else self._split)(*arguments)
        bridge.assign(cache, written)
        bridge.assign(out, result)

    def _run(
        self, q: Any, k: Any, v: Any, cache: Any, work: Any, slots: Any, sinks: Any, k_scale: Any,
        v_scale: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Write the cache and attend; returns the result and the cache."""
        import jax
        import jax.numpy as jnp

        from modulm_kernels_pallas.paged_attention import attend_plain, paged_attention
        from modulm_kernels_pallas.write_kv import write_kv, write_plain

        parts = [_narrow(k, k_scale, cache.dtype)]
        if not self.look.latent:
            parts.append(_narrow(v, v_scale, cache.dtype))
        # Asked when a step is traced: a backend is also created to estimate memory, in a process
        # that must not take the chips.
        on_tpu = jax.default_backend() == "tpu"
        write = write_kv if on_tpu else write_plain
        attend = paged_attention if on_tpu else attend_plain
        written = write(jnp.concatenate(parts, -1), cache, slots, keys=self.look.first)
        result = attend(q, written, work, self.look, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
        return result, written

    def _split(self, q: Any, k: Any, v: Any, cache: Any, work: Any, slots: Any, *more: Any) -> Any:
        """Compute each device's KV heads there, or all on each if they cannot be divided."""
        from modulm_kernels_pallas.spread import current_mesh, over_heads

        mesh = current_mesh()
        divides = mesh is not None and not self.look.latent and cache.shape[1] % mesh.size == 0
        heads = 1 if divides else None
        # One value for all heads, or one for each.
        by_head = [0 if divides and x is not None and len(x) > 1 else None for x in more]
        axes = (heads, heads, heads, heads, None, None, *by_head)
        return over_heads(self._run, axes, (heads, heads), q, k, v, cache, work, slots, *more)

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        from modulm_kernels_pallas import bridge

        array, places = bridge.array_of(cache), bridge.array_of(target)
        bridge.assign(cache, array.at[places].set(array[bridge.array_of(source)]))


def _narrow(x: Any, scale: Any, dtype: Any) -> Any:
    """Divide by the scale of each head and round to the cache's dtype, within its range."""
    import jax.numpy as jnp

    if scale is not None:
        x = x / scale.reshape(1, -1, 1)
    if dtype == jnp.int8:
        return x
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return x.astype(dtype)
