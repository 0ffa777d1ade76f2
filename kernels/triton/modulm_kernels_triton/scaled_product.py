"""Products of codes with codes whose blocks of inputs have scales: MXFP8, MXFP4, NVFP4.

Blackwell and gfx950 multiply such blocks as they are (`tl.dot_scaled`); for other GPUs Triton
converts both sides to bf16 inside the kernel. "_emulated" does that here, for the interpreter,
which has no scaled products, and for NVFP4 where the compiler does not know its scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modulm_kernels_triton.device import interpreting
from modulm_kernels_triton.narrow_floats import e2m1_of_pairs, e4m3_of_bytes

__all__ = ["scaled_product"]

#: Numbers of both sides with their scales are exact in bf16; the interpreter's bf16 is wrong.
_WIDE = tl.constexpr(tl.float32 if interpreting() else tl.bfloat16)


@triton.jit
def _bytes(x, start, inside, k0, K, PAIRS: tl.constexpr, BK: tl.constexpr):
    """Return the bytes of inputs [k0, k0 + BK) of each row, 0 outside."""
    if PAIRS:
        at = k0 // 2 + tl.arange(0, BK // 2)
        there = at * 2 < K
    else:
        at = k0 + tl.arange(0, BK)
        there = at < K
    return tl.load(x + start[:, None] + at[None, :], inside[:, None] & there[None, :], other=0)


@triton.jit
def _scaled(codes, scales, PAIRS: tl.constexpr, NESTED: tl.constexpr, R: tl.constexpr,
            BK: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """Return the numbers [R, BK] that codes stand for, without the scales of rows."""
    numbers = e2m1_of_pairs(codes) if PAIRS else e4m3_of_bytes(codes)
    factor = e4m3_of_bytes(scales) if NESTED else tl.exp2(scales.to(tl.float32) - 127.0)
    wide = tl.broadcast_to(factor[:, :, None], (R, BK // EACH, EACH))
    return (numbers * tl.reshape(wide, (R, BK))).to(_WIDE)


@triton.jit
def scaled_product(
    x, row, x_row, x_scales, x_groups, row_inside,
    weight, scales, weight_factors, x_factors, column, column_inside,
    first, last, K, size, groups,
    FORM: tl.constexpr, ROUNDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute x W^T over inputs [first, last): [BM, BN] fp32.

    x: uint8, e4m3 or pairs of e2m1; scales: uint8, exponents plus 127, or e4m3 for NVFP4, whose
    rows have fp32 factors as well. The stored exponents of e2m1 weights are one too small.
    """
    NESTED: tl.constexpr = ROUNDED == "nvfp4" or ROUNDED == "nvfp4_emulated"
    X_PAIRS: tl.constexpr = ROUNDED != "mxfp8" and ROUNDED != "mxfp8_emulated"
    NATIVE: tl.constexpr = ROUNDED == "nvfp4" or ROUNDED == "mxfp4" or ROUNDED == "mxfp8"
    PAIRS: tl.constexpr = FORM == "e2m1"
    EACH: tl.constexpr = 16 if NESTED else 32
    X_FORM: tl.constexpr = "e2m1" if X_PAIRS else "e4m3"
    W_FORM: tl.constexpr = "e2m1" if PAIRS else "e4m3"
    total = tl.zeros((BM, BN), tl.float32)
    for k0 in range(first, last, BK):
        group = k0 // EACH + tl.arange(0, BK // EACH)
        there = (group < groups)[None, :]
        x_scale = tl.load(
            x_scales + (row * x_groups)[:, None] + group[None, :],
            row_inside[:, None] & there, other=0,
        )  # fmt: skip
        scale = tl.load(
            scales + (column * groups)[:, None] + group[None, :],
            column_inside[:, None] & there, other=0,
        )  # fmt: skip
        if PAIRS and not NESTED:
            scale += 1
        a = _bytes(x, row * x_row, row_inside, k0, K, X_PAIRS, BK)
        b = _bytes(weight, column * size, column_inside, k0, K, PAIRS, BK)
        if NATIVE:
            if NESTED:
                x_scale = x_scale.to(tl.float8e4nv, bitcast=True)
                scale = scale.to(tl.float8e4nv, bitcast=True)
            total = tl.dot_scaled(a, x_scale, X_FORM, tl.trans(b), scale, W_FORM, total)
        else:
            left = _scaled(a, x_scale, X_PAIRS, NESTED, BM, BK, EACH)
            right = _scaled(b, scale, PAIRS, NESTED, BN, BK, EACH)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if NESTED:
        total *= tl.load(x_factors + row, row_inside, other=0.0)[:, None]
        total *= tl.load(weight_factors + column, column_inside, other=0.0)[None, :]
    return total
