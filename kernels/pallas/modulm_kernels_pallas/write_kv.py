"""Write a step's keys and values to the cache, in place if the cache is donated."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from modulm_kernels_pallas.integers import ROWS, block_size, quantize

__all__ = ["write_kv", "write_plain"]


def write_kv(
    entries: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    keys: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Return the cache [blocks, kv heads, block size, width] with `entries` in their slots.

    entries: [tokens, kv heads, width], keys followed by values. slots: [tokens] int32, block *
    block size + offset. Tokens of a block must be adjacent in the step, except in the null block,
    whose contents are then undefined. keys: numbers with the first scale, as in `integers`.
    """
    tokens, heads, width = entries.shape
    size = block_size(cache)
    block = pl.BlockSpec(
        (1, heads, *cache.shape[2:]), lambda t, slots: (jax.lax.div(slots[t], size), 0, 0, 0)
    )
    written = [entries.astype(cache.dtype)[:, :, None]]
    specs = [pl.BlockSpec((1, heads, 1, width), lambda t, slots: (t, 0, 0, 0))]
    if cache.dtype == jnp.int8:
        codes, marks = quantize(entries, keys)
        written = [codes[:, :, None], marks[..., None]]
        specs.append(pl.BlockSpec((1, heads, ROWS, 1), lambda t, slots: (t, 0, 0, 0)))
    return pl.pallas_call(
        partial(_write, size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tokens,),
            in_specs=[*specs, block],
            out_specs=block,
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={1 + len(written): 0},
        interpret=interpret,
    )(slots.astype(jnp.int32), *written, cache)


def write_plain(
    entries: jax.Array, cache: jax.Array, slots: jax.Array, *, keys: int = 0
) -> jax.Array:
    """Compute `write_kv` with XLA's scatter."""
    size = block_size(cache)
    blocks, offsets = slots // size, slots % size
    if cache.dtype != jnp.int8:
        return cache.at[blocks, :, offsets].set(entries.astype(cache.dtype))
    codes, marks = quantize(entries, keys)
    changed = cache.at[blocks, :, offsets].set(codes)
    rows = size + jnp.arange(ROWS)
    return changed.at[blocks[:, None], :, rows, offsets[:, None]].set(marks.swapaxes(1, 2))


def _write(slots: Any, entry: Any, *more: Any, size: int) -> None:
    *marks, cache, out = more
    token = pl.program_id(0)
    slot = slots[token]
    before = slots[jnp.maximum(token - 1, 0)]
    # The output block stays in memory while its index is the same; the input's copy is older.
    fresh = (token == 0) | (jax.lax.div(before, size) != jax.lax.div(slot, size))

    @pl.when(fresh)
    def _() -> None:
        out[...] = cache[...]

    offset = jax.lax.rem(slot, size)
    rows = jax.lax.broadcasted_iota(jnp.int32, (1, 1, size, 1), 2)
    if not marks:
        out[...] = jnp.where(rows == offset, entry[...], out[...])
        return
    out[:, :, :size] = jnp.where(rows == offset, entry[...], out[:, :, :size])
    columns = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, out.shape[3]), 3)
    out[:, :, size:] = jnp.where(columns == offset, marks[0][...], out[:, :, size:])
