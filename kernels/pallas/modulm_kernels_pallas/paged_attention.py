"""Ragged paged attention: prompts and single tokens of a step in one kernel.

One program attends with a tile of queries (see `tiles`) to one block of keys and values of all
heads. Programs of a tile run in order and keep the running maximum, sum and result in scratch
memory (online softmax: Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from modulm_kernels_pallas.integers import block_size, scales_of

__all__ = ["Look", "Work", "attend_plain", "paged_attention"]

#: Score of what a query does not see; finite, so that differences are.
_UNSEEN = -1e30


class Look(NamedTuple):
    """What queries see, and the form of the cache.

    size: numbers of a key, which come first. values: numbers of a value, which follow, or which
    are the first ones of the key if `latent`. window: 0 for all keys.
    """

    size: int
    values: int
    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    latent: bool = False

    @property
    def first(self) -> int:
        """Numbers of a cache of integers that share the first scale."""
        return self.values if self.latent else self.size


class Work(NamedTuple):
    """A step: its block tables [rows, columns] int32 and the arrays of `Tiles`."""

    tables: jax.Array
    rows: jax.Array
    tokens: jax.Array
    positions: jax.Array
    lengths: jax.Array
    first: jax.Array
    last: jax.Array
    places: jax.Array


def paged_attention(
    q: jax.Array,
    cache: jax.Array,
    work: Work,
    look: Look,
    *,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attend; q: [tokens, heads, size], cache: [blocks, kv heads, block size, size + values], or
    as in `integers`.

    sinks: [heads] fp32, scores of a key without value. k_scale, v_scale: [1] or [kv heads] fp32,
    factors of what is cached. Returns [tokens, heads, values] in q's dtype. interpret: run on any
    device, slowly.
    """
    grouped = _grouped(q, cache, work, k_scale)
    tiles, heads, queries, _ = grouped.shape
    block = block_size(cache)
    group, size = q.shape[1] // heads, work.tokens.shape[1]
    positions = jnp.repeat(work.positions, group, axis=1)[..., None]
    inputs: list[jax.Array] = [grouped, positions, cache]
    specs = [
        pl.BlockSpec((1, heads, queries, look.size), lambda t, p, *_: (t, 0, 0, 0)),
        pl.BlockSpec((1, queries, 1), lambda t, p, *_: (t, 0, 0)),
        pl.BlockSpec((1, heads, *cache.shape[2:]), _block_of),
    ]
    if sinks is not None:
        inputs.append(_sinks(sinks, heads, size))
        specs.append(pl.BlockSpec((heads, queries, 1), lambda t, p, *_: (0, 0, 0)))
    out = pl.pallas_call(
        partial(_attend, look=look, block=block, heads=heads, sinks=sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(tiles, work.tables.shape[1]),
            in_specs=specs,
            out_specs=pl.BlockSpec((1, heads, queries, look.values), lambda t, p, *_: (t, 0, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((heads, queries, 1), jnp.float32),
                pltpu.VMEM((heads, queries, 1), jnp.float32),
                pltpu.VMEM((heads, queries, look.values), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((tiles, heads, queries, look.values), q.dtype),
        interpret=interpret,
    )(work.tables, work.rows, work.first, work.last, work.lengths, *inputs)
    return _scattered(out, work, v_scale)


def attend_plain(
    q: jax.Array,
    cache: jax.Array,
    work: Work,
    look: Look,
    *,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """Compute `paged_attention` with XLA's operations, which gather all blocks of each tile."""
    grouped = _grouped(q, cache, work, k_scale)
    tiles, heads, _, _ = grouped.shape
    block = block_size(cache)
    pages = cache[work.tables[work.rows]].transpose(0, 2, 1, 3, 4)
    wide = pages[..., :block, :].astype(jnp.float32)
    if cache.dtype == jnp.int8:
        scales = scales_of(pages[..., block:, :block])
        parts = jnp.split(wide, [look.first], -1)
        scaled = (part * s.swapaxes(-1, -2) for part, s in zip(parts, scales, strict=True))
        wide = jnp.concatenate(tuple(scaled), -1)
    k = wide[..., : look.size]
    v = wide[..., : look.values] if look.latent else wide[..., look.size :]
    k, v = (part.reshape(tiles, heads, -1, part.shape[-1]) for part in (k, v))
    scores = jnp.einsum("thqd,thkd->thqk", grouped.astype(jnp.float32), k, precision="highest")
    scores = _capped(scores * look.scale, look)
    positions = jnp.repeat(work.positions, q.shape[1] // heads, axis=1)[..., None]
    places = jnp.arange(k.shape[2])[None, None]
    seen = _visible(positions, places, work.lengths[:, None, None], look)[:, None]
    most = jnp.where(seen, scores, _UNSEEN).max(-1, keepdims=True)
    column = None if sinks is None else _sinks(sinks, heads, work.tokens.shape[1])[None]
    if column is not None:
        most = jnp.maximum(most, column)
    weights = jnp.where(seen, jnp.exp(scores - most), 0.0)
    total = weights.sum(-1, keepdims=True)
    if column is not None:
        total = total + jnp.exp(column - most)
    result = jnp.einsum("thqk,thkd->thqd", weights, v, precision="highest")
    return _scattered((result / jnp.maximum(total, 1e-30)).astype(q.dtype), work, v_scale)


def _block_of(
    tile: Any, column: Any, tables: Any, rows: Any, first: Any, last: Any, lengths: Any
) -> tuple[Any, int, int, int]:
    """The block of keys for a program. Past the last one it repeats, so nothing is copied."""
    place = jnp.maximum(jnp.minimum(first[tile] + column, last[tile]), 0)
    return tables[rows[tile], place], 0, 0, 0


def _attend(
    tables: Any, rows: Any, first: Any, last: Any, lengths: Any, q: Any, positions: Any, cache: Any,
    *more: Any, look: Look, block: int, heads: int, sinks: bool,
) -> None:  # fmt: skip
    column, out, most, total, result = more if sinks else (None, *more)
    integers = cache.dtype == jnp.int8
    tile, step = pl.program_id(0), pl.program_id(1)
    place = first[tile] + step

    @pl.when(step == 0)
    def _() -> None:
        most[...] = jnp.full_like(most, _UNSEEN) if column is None else column[...]
        total[...] = jnp.zeros_like(total) if column is None else jnp.ones_like(total)
        result[...] = jnp.zeros_like(result)

    @pl.when(place <= last[tile])
    def _() -> None:
        places = place * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        seen = _visible(positions[0], places, lengths[tile], look)
        for head in range(heads):
            queries = q[0, head]
            entries = cache[0, head, :block].astype(queries.dtype)
            k = entries[:, : look.size]
            v = entries[:, : look.values] if look.latent else entries[:, look.size :]
            if integers:
                scales = scales_of(cache[0, head, block:, :block])
                v_scales = scales[0 if look.latent else 1]
                products = _product(queries[:, : look.first], k[:, : look.first], 1) * scales[0]
                if look.first < look.size:
                    rest = _product(queries[:, look.first :], k[:, look.first :], 1)
                    products = products + rest * scales[1]
            else:
                products = _product(queries, k, 1)
            scores = _capped(products * look.scale, look)
            before = most[head]
            now = jnp.maximum(before, jnp.where(seen, scores, _UNSEEN).max(1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
            factor = jnp.exp(before - now)
            most[head] = now
            total[head] = factor * total[head] + weights.sum(1, keepdims=True)
            if integers:
                weights = weights * v_scales
            result[head] = factor * result[head] + _product(weights.astype(v.dtype), v, 0)

    @pl.when(step == pl.num_programs(1) - 1)
    def _() -> None:
        out[0] = (result[...] / jnp.maximum(total[...], 1e-30)).astype(out.dtype)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Sum over x's last axis and the given one of y, in fp32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _capped(scores: jax.Array, look: Look) -> jax.Array:
    return look.softcap * jnp.tanh(scores / look.softcap) if look.softcap else scores


def _visible(positions: Any, keys: Any, length: Any, look: Look) -> Any:
    """Whether queries at `positions` (-1: padding) see the keys, in a row of `length` tokens."""
    seen = (positions >= 0) & (keys < length)
    if look.causal:
        seen = seen & (keys <= positions)
    if look.window:
        seen = seen & (keys > positions - look.window)
    return seen


def _grouped(q: jax.Array, cache: jax.Array, work: Work, k_scale: jax.Array | None) -> jax.Array:
    """Arrange queries as [tiles, kv heads, size of a tile * heads per kv head, size]."""
    kv_heads = cache.shape[1]
    tiles, size = work.tokens.shape
    parts = q[work.tokens].reshape(tiles, size, kv_heads, -1, q.shape[-1])
    if k_scale is not None:
        parts = (parts * k_scale.reshape(1, 1, -1, 1, 1)).astype(q.dtype)
    return parts.transpose(0, 2, 1, 3, 4).reshape(tiles, kv_heads, -1, q.shape[-1])


def _sinks(sinks: jax.Array, kv_heads: int, size: int) -> jax.Array:
    """Arrange sinks like the queries of a tile: [kv heads, queries, 1] fp32."""
    each = sinks.astype(jnp.float32).reshape(kv_heads, 1, -1)
    return jnp.broadcast_to(each, (kv_heads, size, each.shape[-1])).reshape(kv_heads, -1, 1)


def _scattered(out: jax.Array, work: Work, v_scale: jax.Array | None) -> jax.Array:
    """Return the results of all tiles in the order of the step's tokens."""
    tiles, kv_heads, _, values = out.shape
    size = work.tokens.shape[1]
    parts = out.reshape(tiles, kv_heads, size, -1, values).transpose(0, 2, 1, 3, 4)
    if v_scale is not None:
        parts = (parts * v_scale.reshape(1, 1, -1, 1, 1)).astype(out.dtype)
    return parts.reshape(tiles * size, -1, values)[work.places]
