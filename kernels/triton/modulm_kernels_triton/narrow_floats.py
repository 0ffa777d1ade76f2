"""Floats of four and eight bits: e2m1 codes in pairs, and e4m3 bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from modulm_kernels_triton.kept_numbers import bytes_of_float8

__all__ = ["blocks_of_e2m1", "codes_of_e2m1", "e2m1_of_pairs", "e4m3_of_bytes"]


@triton.jit
def e4m3_of_bytes(byte):
    """Return e4m3 bytes as fp32: the exponent of fp16 has a bias that is 8 more."""
    wide = byte.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def e2m1_of_pairs(pairs):
    """Return e2m1 codes, two per byte with the first in the low half, as fp32: twice as many."""
    code = tl.interleave(pairs & 15, pairs >> 4)
    power, low = (code >> 1) & 3, code & 1
    shift = tl.where(power > 0, power - 1, 0).to(tl.uint8)
    doubled = tl.where(power > 0, (low | 2) << shift, low).to(tl.float32)
    return tl.where(code > 7, -doubled, doubled) * 0.5


@triton.jit
def codes_of_e2m1(x):
    """Return the codes of the nearest e2m1 numbers, uint8; ties to even codes."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return (code | sign).to(tl.uint8)


@triton.jit
def _block(grouped, wanted):
    """Return codes, e4m3 scales, and the squared error, for groups [.., 16] with these scales."""
    stored = bytes_of_float8(tl.minimum(tl.maximum(wanted, 0.001953125), 448.0), 3, 7, 448.0)
    scale = e4m3_of_bytes(stored)
    codes = codes_of_e2m1(grouped / tl.expand_dims(scale, 2))
    power, low = (codes >> 1) & 3, codes & 1
    shift = tl.where(power > 0, power - 1, 0).to(tl.uint8)
    size = tl.where(power > 0, (low | 2) << shift, low).to(tl.float32) * 0.5
    error = size * tl.expand_dims(scale, 2) - tl.abs(grouped)
    return codes, stored, tl.sum(error * error, 2)


@triton.jit
def blocks_of_e2m1(x, ROWS: tl.constexpr, SIZE: tl.constexpr, CHOOSE: tl.constexpr):
    """Round x [ROWS, SIZE] fp32 to NVFP4: (pairs [ROWS, SIZE / 2], scales [ROWS, SIZE / 16]) uint8.

    CHOOSE: of a group's largest magnitude over 6 and over 4, take the scale with the smaller error.
    """
    grouped = tl.reshape(x, (ROWS, SIZE // 16, 16))
    most = tl.max(tl.abs(grouped), 2)
    codes, scales, error = _block(grouped, most / 6.0)
    if CHOOSE:
        others, wider, error_of = _block(grouped, most / 4.0)
        better = error_of < error
        codes = tl.where(tl.expand_dims(better, 2), others, codes)
        scales = tl.where(better, wider, scales)
    first, second = tl.split(tl.reshape(codes, (ROWS, SIZE // 2, 2)))
    return first | (second << 4), scales
