"""Caches of 8-bit integers with a scale per token and head.

A block is [heads, block size + 4, width] int8. Row i holds token i: its key, then its value. Column
i of the last rows holds what the token's scales are made of: mantissa and exponent of the key's and
of the value's. A latent is a value followed by the rest of its key: its two scales are theirs. A
scale is (1 + (mantissa + 128) / 256) 2^exponent.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["ROWS", "block_size", "quantize", "scales_of"]

#: Rows of a block beside those of tokens.
ROWS = 4
_LEAST, _MOST = -126, 126


def block_size(cache: Any) -> int:
    """Return the tokens of a block of a cache [blocks, heads, rows, width]."""
    rows = int(cache.shape[2])
    return rows - ROWS if cache.dtype == jnp.int8 else rows


def quantize(entries: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return codes [tokens, heads, width] int8 and [tokens, heads, ROWS] int8.

    entries: [tokens, heads, width], of which the first `size` numbers share the first scale. A
    scale is the largest magnitude / 127, rounded up to its form: codes need no clipping.
    """
    codes, marks = [], []
    for part in (entries[..., :size], entries[..., size:]):
        wide = part.astype(jnp.float32)
        smallest = jnp.abs(wide).max(-1, keepdims=True) / 127
        fraction, exponent = jnp.frexp(jnp.maximum(smallest, 2.0**_LEAST))
        steps = jnp.ceil((2 * fraction - 1) * 256).astype(jnp.int32)
        power = jnp.minimum(exponent - 1 + steps // 256, _MOST)
        steps = steps % 256
        scale = _scale(steps - 128, power)
        codes.append(jnp.round(wide / scale).astype(jnp.int8))
        marks += [steps - 128, power]
    return jnp.concatenate(codes, -1), jnp.concatenate(marks, -1).astype(jnp.int8)


def scales_of(marks: Any) -> tuple[Any, Any]:
    """Return both scales [..., 1, tokens] fp32; marks: [..., ROWS, tokens]."""
    wide = marks.astype(jnp.int32)
    return (
        _scale(wide[..., 0:1, :], wide[..., 1:2, :]), _scale(wide[..., 2:3, :], wide[..., 3:4, :])
    )  # fmt: skip


def _scale(mantissa: Any, exponent: Any) -> Any:
    share = 1 + (mantissa + 128).astype(jnp.float32) / 256
    return share * jnp.exp2(exponent.astype(jnp.float32))
