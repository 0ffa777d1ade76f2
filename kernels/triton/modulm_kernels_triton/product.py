"""Inner loop of products with stored weights, shared by linear layers and experts.

A weight row of K numbers is stored as floats, bytes, or 4-bit codes, two per byte with the first in
the low half. Sums over K have a fixed order, in blocks of BK.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modulm_kernels_triton.scaled_product import scaled_product

__all__ = ["product"]


@triton.jit
def _nibbles(weight, start, column_inside, k0, size, BN: tl.constexpr, BK: tl.constexpr):
    """Return 4-bit codes: [BN, BK] uint8, 0 outside."""
    at = k0 // 2 + tl.arange(0, BK // 2)
    inside = column_inside[:, None] & (at < size)[None, :]
    pairs = tl.load(weight + start[:, None] + at[None, :], inside, other=0)
    return tl.interleave(pairs & 15, pairs >> 4)


@triton.jit
def _numbers(
    weight, table, start, column_inside, k0, inside, size,
    FORM: tl.constexpr, RAW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return stored numbers [BN, BK]: integers as int8; fp8 as fp16, divided by 256, or RAW."""
    if FORM == "int4":
        numbers = _nibbles(weight, start, column_inside, k0, size, BN, BK).to(tl.int8) - 8
    elif FORM == "e2m1":  # doubled e2m1: one mantissa bit, two exponent bits
        code = _nibbles(weight, start, column_inside, k0, size, BN, BK)
        power, low = (code >> 1) & 3, code & 1
        shift = tl.where(power > 0, power - 1, 0).to(tl.uint8)
        magnitude = tl.where(power > 0, (low | 2) << shift, low).to(tl.int8)
        numbers = tl.where(code > 7, -magnitude, magnitude)
    elif FORM == "iq4":
        code = _nibbles(weight, start, column_inside, k0, size, BN, BK)
        numbers = tl.load(table + code.to(tl.int32))
    else:
        at = k0 + tl.arange(0, BK)
        where = column_inside[:, None] & inside[None, :]
        source = weight + start[:, None] + at[None, :]
        if FORM == "int8":
            numbers = tl.load(source, where, other=0)
        elif FORM == "fp8" and not RAW:
            # The exponent of e4m3 is part of that of fp16, whose bias is 8 more.
            byte = tl.load(source, where, other=0).to(tl.uint16)
            numbers = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True)
        else:
            numbers = tl.load(source, where, other=0.0)
    return numbers


@triton.jit
def _scale(scales, at, inside, EXPONENTS: tl.constexpr):
    values = tl.load(scales + at, inside, other=0)
    if EXPONENTS:
        values = tl.exp2(values.to(tl.float32) - 127.0)
    return values.to(tl.float32)


@triton.jit
def _spread(values, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Repeat [BN, BK / GROUP] to [BN, BK]."""
    wide = tl.broadcast_to(values[:, :, None], (BN, BK // GROUP, GROUP))
    return tl.reshape(wide, (BN, BK))


@triton.jit
def product(
    x, row, x_row, x_scales, x_groups, row_inside,
    weight, scales, zeros, table, column, column_inside,
    first, last, K, size, groups,
    FORM: tl.constexpr, ROUNDED: tl.constexpr, GROUP: tl.constexpr, EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Compute x W^T over inputs [first, last): [BM, BN] fp32.

    row: [BM] int64, rows of x, x_row apart. column: [BN] int64, rows of W. size: stored elements
    per row. groups: scales per row, for GROUP inputs each (0: for all). ROUNDED: "" for floats in
    x, "int8" with a scale per 256 inputs in x_scales, "fp8" with one per 128, "fp8_token" with one
    per row. SCALED: ROUNDED is a format of scaled_product.py, `zeros` and `table` its factors.
    """
    if SCALED:
        total = scaled_product(
            x, row, x_row, x_scales, x_groups, row_inside,
            weight, scales, zeros, table, column, column_inside,
            first, last, K, size, groups, FORM, ROUNDED, BM, BN, BK,
        )  # fmt: skip
    else:
        total = _plain_product(
            x, row * x_row, x_scales, row * x_groups, row_inside,
            weight, scales, zeros, table, column, column_inside,
            first, last, K, size, groups,
            FORM, ROUNDED, GROUP, EXPONENTS, ZEROS, BM, BN, BK,
        )  # fmt: skip
    return total


@triton.jit
def _plain_product(
    x, x_at, x_scales, x_scales_at, row_inside,
    weight, scales, zeros, table, column, column_inside,
    first, last, K, size, groups,
    FORM: tl.constexpr, ROUNDED: tl.constexpr, GROUP: tl.constexpr, EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As `product`; x_at, x_scales_at: [BM] int64, offsets of rows."""
    FP8: tl.constexpr = ROUNDED == "fp8" or ROUNDED == "fp8_token"
    total = tl.zeros((BM, BN), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    start = column * size
    every: tl.constexpr = 256 if ROUNDED == "int8" else 128
    for k0 in range(first, last, BK):
        k = k0 + tl.arange(0, BK)
        inside = k < K
        a = tl.load(
            x + x_at[:, None] + k[None, :],
            row_inside[:, None] & inside[None, :],
            other=0 if ROUNDED == "int8" else 0.0,
        )
        b = _numbers(weight, table, start, column_inside, k0, inside, size, FORM, FP8, BN, BK)
        if FORM == "plain":
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        elif GROUP > 0 and GROUP < BK:
            at = k0 // GROUP + tl.arange(0, BK // GROUP)
            scale_at = column[:, None] * groups + at[None, :]
            known = column_inside[:, None] & (at < groups)[None, :]
            wide = b.to(tl.float32)
            if FORM == "fp8":
                wide *= 256.0
            if ZEROS:
                zero = tl.load(zeros + scale_at, known, other=0).to(tl.float32)
                wide -= _spread(zero, BN, BK, GROUP)
            wide *= _spread(_scale(scales, scale_at, known, EXPONENTS), BN, BK, GROUP)
            total = tl.dot(a, tl.trans(wide.to(a.dtype)), total, input_precision="ieee")
        else:
            if ROUNDED == "int8":
                part = tl.dot(a, tl.trans(b), out_dtype=tl.int32).to(tl.float32)
            elif FP8:
                part = tl.dot(a, tl.trans(b))
            else:
                part = tl.dot(a, tl.trans(b.to(a.dtype)), input_precision="ieee")
            if ZEROS:
                line = tl.sum(a.to(tl.float32), 1)
            if ROUNDED != "" and ROUNDED != "fp8_token":
                factor = tl.load(x_scales + x_scales_at + k0 // every, row_inside, other=0.0)
                part *= factor[:, None]
                if ZEROS:
                    line *= factor
            if GROUP > 0:
                scale_at = column * groups + k0 // GROUP
                if ZEROS:
                    zero = tl.load(zeros + scale_at, column_inside, other=0).to(tl.float32)
                    part -= line[:, None] * zero[None, :]
                total += part * _scale(scales, scale_at, column_inside, EXPONENTS)[None, :]
            else:
                total += part
                if ZEROS:
                    sums += line
    if FORM != "plain" and GROUP == 0:
        if ZEROS:
            zero = tl.load(zeros + column, column_inside, other=0).to(tl.float32)
            total -= sums[:, None] * zero[None, :]
        total *= _scale(scales, column, column_inside, EXPONENTS)[None, :]
    if ROUNDED == "fp8_token":
        total *= tl.load(x_scales + x_scales_at, row_inside, other=0.0)[:, None]
    if FORM == "fp8" and ROUNDED == "" and not (GROUP > 0 and GROUP < BK):
        total *= 256.0
    return total
