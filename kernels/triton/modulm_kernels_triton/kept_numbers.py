"""Convert numbers for the cache: unchanged, as bytes of 8-bit floats, or as int8 with a scale.

8-bit floats are rounded to nearest even and clamped to the largest number by integer arithmetic,
because not every GPU has an instruction for it and Triton's interpreter rounds differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["bytes_of_float8", "keep"]

_E4M3 = tl.constexpr(1)
_E5M2 = tl.constexpr(2)
_INT8 = tl.constexpr(3)
_SCALED_E4M3 = tl.constexpr(4)


@triton.jit
def bytes_of_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr):
    """Convert x fp32 to uint8, the nearest 8-bit float."""
    size = tl.minimum(tl.abs(x), MOST)
    bits = size.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    half = (1 << (SHIFT - 1)) - 1
    normal = ((bits + half + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number: an addition that leaves only the bits of the format.
    MAGIC: tl.constexpr = 2.0 ** (24 - MANTISSA - BIAS)
    small = (size + MAGIC).to(tl.int32, bitcast=True) & ((1 << (MANTISSA + 1)) - 1)
    LEAST: tl.constexpr = 2.0 ** (1 - BIAS)
    code = tl.where(size < LEAST, small, normal)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def keep(x, where, mask, scale, at_scale, scale_mask, KEPT: tl.constexpr):
    """Write x [heads, size] fp32 to the pointers `where`; padding is zero.

    KEPT: the format's code (cache.py). For int8 and scaled e4m3, the scale of each head is written
    to at_scale [heads]; other formats are divided by `scale` [heads] first.
    """
    if KEPT == _INT8:
        of_head = tl.maximum(tl.max(tl.abs(x), 1) / 127.0, 1e-12)
        ratio = x / of_head[:, None]
        below = tl.floor(ratio)
        rest = ratio - below
        odd = below - 2.0 * tl.floor(below * 0.5)
        up = (rest > 0.5) | ((rest == 0.5) & (odd == 1.0))
        tl.store(where, tl.where(up, below + 1.0, below).to(tl.int8), mask)
        tl.store(at_scale, of_head, scale_mask)
    elif KEPT == _SCALED_E4M3:
        of_head = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1e-12)
        tl.store(where, bytes_of_float8(x / of_head[:, None], 3, 7, 448.0), mask)
        tl.store(at_scale, of_head, scale_mask)
    else:
        x = x / scale[:, None]
        if KEPT == _E4M3:
            tl.store(where, bytes_of_float8(x, 3, 7, 448.0), mask)
        elif KEPT == _E5M2:
            tl.store(where, bytes_of_float8(x, 2, 15, 57344.0), mask)
        else:
            tl.store(where, x.to(where.dtype.element_ty), mask)
