"""Write a step's keys and values to the cache, in place if the cache is donated."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

__all__ = ["write_kv", "write_plain"]


def write_kv(
    entries: jax.Array, cache: jax.Array, slots: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Return the cache [blocks, kv heads, block size, width] with `entries` in their slots.

    entries: [tokens, kv heads, width], keys followed by values. slots: [tokens] int32, block *
    block size + offset. Tokens of a block must be adjacent in the step, except in the null block,
    whose contents are then undefined.
    """
    tokens, heads, width = entries.shape
    size = cache.shape[2]
    block = pl.BlockSpec(
        (1, heads, size, width), lambda t, slots: (jax.lax.div(slots[t], size), 0, 0, 0)
    )
    return pl.pallas_call(
        partial(_write, size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tokens,),
            in_specs=[
                pl.BlockSpec((1, heads, 1, width), lambda t, slots: (t, 0, 0, 0)),
                block,
            ],
            out_specs=block,
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={2: 0},
        interpret=interpret,
    )(slots.astype(jnp.int32), entries.astype(cache.dtype)[:, :, None], cache)


def write_plain(entries: jax.Array, cache: jax.Array, slots: jax.Array) -> jax.Array:
    """Compute `write_kv` with XLA's scatter."""
    size = cache.shape[2]
    return cache.at[slots // size, :, slots % size].set(entries.astype(cache.dtype))


def _write(slots: Any, entry: Any, cache: Any, out: Any, *, size: int) -> None:
    token = pl.program_id(0)
    slot = slots[token]
    before = slots[jnp.maximum(token - 1, 0)]
    # The output block stays in memory while its index is the same; the input's copy is older.
    fresh = (token == 0) | (jax.lax.div(before, size) != jax.lax.div(slot, size))

    @pl.when(fresh)
    def _() -> None:
        out[...] = cache[...]

    offsets = jax.lax.broadcasted_iota(jnp.int32, (1, 1, size, 1), 2)
    out[...] = jnp.where(offsets == jax.lax.rem(slot, size), entry[...], out[...])
