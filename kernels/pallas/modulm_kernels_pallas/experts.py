"""Products of a mixture of experts: rows grouped by expert, one weight for each group."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

__all__ = ["Groups", "group_rows", "grouped_matmul", "grouped_plain"]

_LANES = 128
_ROWS, _COLUMNS, _INPUTS = 64, 512, 512


class Groups(NamedTuple):
    """Choices of experts (a token and one of its experts) arranged in tiles of one expert each.

    sources: [tiles, rows] int32, the token of each row, 0 for padding. experts: [tiles] int32.
    used: [tiles] int32, 1 for tiles that are not all padding. places: [tokens, choices] int32, the
    index of each choice among all rows of all tiles.
    """

    sources: jax.Array
    experts: jax.Array
    used: jax.Array
    places: jax.Array


def group_rows(ids: jax.Array, experts: int, rows: int = _ROWS) -> Groups:
    """Group choices by expert; ids: [tokens, choices] int.

    The number of tiles depends only on the shapes: choices / rows, rounded up, plus `experts`.
    """
    flat = ids.reshape(-1).astype(jnp.int32)
    count = flat.shape[0]
    tiles = -(-count // rows) + experts
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=experts)
    each = (sizes + rows - 1) // rows
    ends = jnp.cumsum(each)
    number = jnp.arange(tiles)
    owners = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
    used = (owners < experts).astype(jnp.int32)
    sorted_ids = flat[order]
    rank = jnp.arange(count) - (jnp.cumsum(sizes) - sizes)[sorted_ids]
    at = ((ends - each) * rows)[sorted_ids] + rank
    sources = (
        jnp.zeros(tiles * rows, jnp.int32).at[at].set((order // ids.shape[1]).astype(jnp.int32))
    )
    places = jnp.zeros(count, jnp.int32).at[order].set(at.astype(jnp.int32))
    return Groups(
        sources.reshape(tiles, rows), jnp.minimum(owners, experts - 1), used,
        places.reshape(ids.shape),
    )  # fmt: skip


def grouped_matmul(
    x: jax.Array, weights: jax.Array, groups: Groups, *, interpret: bool = False
) -> jax.Array:
    """Multiply each tile by its expert's weight.

    x: [tiles, rows, K]; weights: [experts, N, K] -> [tiles, rows, N] in x's dtype. Tiles that are
    all padding are undefined.
    """
    tiles, rows, inputs = x.shape
    outputs = weights.shape[1]
    columns, span = _divisor(outputs, _COLUMNS), _divisor(inputs, _INPUTS)
    return pl.pallas_call(
        _multiply,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiles, outputs // columns, inputs // span),
            in_specs=[
                pl.BlockSpec((1, rows, span), lambda t, n, k, *_: (t, 0, k)),
                pl.BlockSpec((1, columns, span), lambda t, n, k, experts, _: (experts[t], n, k)),
            ],
            out_specs=pl.BlockSpec((1, rows, columns), lambda t, n, k, *_: (t, 0, n)),
            scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((tiles, rows, outputs), x.dtype),
        interpret=interpret,
    )(groups.experts, groups.used, x, weights)


def grouped_plain(x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    """Compute `grouped_matmul` with XLA, one tile after another."""
    precision = "highest" if x.dtype == jnp.float32 else None

    def multiply(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, expert = tile
        return jnp.dot(rows, weights[expert].T, precision=precision).astype(x.dtype)

    return jax.lax.map(multiply, (x, groups.experts))


def _multiply(experts: Any, used: Any, x: Any, weights: Any, out: Any, total: Any) -> None:
    tile, step = pl.program_id(0), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(used[tile] == 1)
    def _() -> None:
        rows = x[0]
        precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
        total[...] += jax.lax.dot_general(
            rows, weights[0], (((1,), (1,)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        out[0] = total[...].astype(out.dtype)


def _divisor(size: int, most: int) -> int:
    """Return the largest multiple of 128 up to `most` that divides `size`, or all of it."""
    fitting = [n for n in range(_LANES, most + 1, _LANES) if size % n == 0]
    return max(fitting, default=size)
