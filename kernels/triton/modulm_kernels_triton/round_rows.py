"""Quantize the rows of a product's input, as `modulm_quantized.round_activations` defines it.

Numbers are brought to values of the smaller format before conversion, so the result does not depend
on how the device or the interpreter rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from modulm_kernels_triton.kept_numbers import bytes_of_float8
from modulm_kernels_triton.launch import cut, launch
from modulm_kernels_triton.narrow_floats import codes_of_e2m1, e4m3_of_bytes

__all__ = [
    "EACH",
    "KEPT",
    "LARGEST",
    "RoundedRows",
    "block_scales",
    "empty_blocks",
    "nearest_numbers",
    "round_rows",
]

#: Numbers that share a scale; dtype and largest number of formats with fp32 scales.
EACH = {"int8": 256, "fp8": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
KEPT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}
#: What a row's largest number is divided by to get the row's own factor.
_OVER = {"fp8_token": 448.0, "nvfp4": 6.0 * 448.0}
#: Least magnitude whose exponent is kept.
_LEAST = tl.constexpr(2.0**-118)
#: Numbers of a program.
_BLOCK = 512


@frozen(eq=False)
class RoundedRows:
    """Inputs [T, K] as `product` takes them.

    codes: [T, K] of bytes or floats, or [T, K / 2] pairs of e2m1. scales: [T, groups], or one
    number for all rows; unused for floats. factors: [T] fp32 for NVFP4.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor | None = None

    @property
    def stride(self) -> int:
        """Scales from one row to the next."""
        return self.scales.stride(0) if self.scales.dim() == 2 else 0


@triton.jit
def _nearest(x, large):
    """Return the nearest multiple of `large`'s last bit; ties to even."""
    return (x + large) - large


@triton.jit
def nearest_numbers(wide, LARGEST: tl.constexpr, WHOLE: tl.constexpr):
    """Return the nearest integers (WHOLE) or e4m3 numbers, up to LARGEST, as fp32."""
    wide = tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
    if WHOLE:
        wide = _nearest(wide, 12582912.0)
    else:
        bits = wide.to(tl.int32, bitcast=True)
        rounded_bits = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20
        normal = rounded_bits.to(tl.float32, bitcast=True)
        wide = tl.where(tl.abs(wide) < 0.015625, _nearest(wide, 24576.0), normal)
    return wide


@triton.jit
def _round(
    x, x_row, out, scales, scale_row, size,
    LARGEST: tl.constexpr, WHOLE: tl.constexpr, GIVEN: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """GIVEN: rows have one scale each, which is known."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = group * EACH + tl.arange(0, EACH)
    inside = at < size
    wide = tl.load(x + row * x_row + at, inside, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.load(scales + row * scale_row)
    else:
        scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / LARGEST
    wide = nearest_numbers(wide / scale, LARGEST, WHOLE)
    tl.store(out + row * size + at, wide.to(out.dtype.element_ty), inside)
    if not GIVEN:
        tl.store(scales + row * scale_row + group, scale)


@triton.jit
def _largest(x, x_row, to, size, OVER: tl.constexpr, BLOCK: tl.constexpr):
    """Write each row's largest magnitude over OVER."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        wide = tl.load(x + row * x_row + at, at < size, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(wide))
    tl.store(to + row, tl.maximum(tl.max(most, 0), 1e-12) / OVER)


@triton.jit
def block_scales(most, whole, PAIRS: tl.constexpr, NESTED: tl.constexpr):
    """Return the scales of groups, as bytes and in fp32, from their largest magnitudes.

    whole: a row's factor (NESTED, NVFP4). PAIRS: the numbers become e2m1, else e4m3.
    """
    if NESTED:
        nested = tl.minimum(tl.maximum(most / 6.0 / whole, 0.001953125), 448.0)
        stored = bytes_of_float8(nested, 3, 7, 448.0)
        scale = e4m3_of_bytes(stored) * whole
    else:
        TOP: tl.constexpr = 2 if PAIRS else 8
        power = (tl.maximum(most, _LEAST).to(tl.int32, bitcast=True) >> 23) - TOP
        stored = power.to(tl.uint8)
        scale = (power << 23).to(tl.float32, bitcast=True)
    return stored, scale


@triton.jit
def _round_blocks(
    x, x_row, out, out_row, scales, factors, size, groups,
    PAIRS: tl.constexpr, NESTED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round BLOCK numbers, in groups with a scale each; even and odd ones, a byte's two, apart."""
    G: tl.constexpr = BLOCK // GROUP
    HALF: tl.constexpr = GROUP // 2
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = block * G + tl.arange(0, G)
    pair = group[:, None] * HALF + tl.arange(0, HALF)[None, :]
    inside = pair * 2 < size
    source = x + row * x_row + pair * 2
    even = tl.load(source, inside, other=0.0).to(tl.float32)
    odd = tl.load(source + 1, inside, other=0.0).to(tl.float32)
    most = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    whole = tl.load(factors + row) if NESTED else 1.0
    stored, scale = block_scales(most, whole, PAIRS, NESTED)
    tl.store(scales + row * groups + group, stored, group < groups)
    even, odd = even / scale[:, None], odd / scale[:, None]
    if PAIRS:
        codes = codes_of_e2m1(even) | (codes_of_e2m1(odd) << 4)
        tl.store(out + row * out_row + pair, codes, inside)
    else:
        tl.store(out + row * out_row + pair * 2, bytes_of_float8(even, 3, 7, 448.0), inside)
        tl.store(out + row * out_row + pair * 2 + 1, bytes_of_float8(odd, 3, 7, 448.0), inside)


def round_rows(x: Tensor, to: str, scale: Tensor | None = None) -> RoundedRows:
    """Quantize x [T, K] with dense rows to a format of `modulm_quantized.ACTIVATION_FORMATS`.

    "" leaves x as it is. scale: one fp32 number, the static scale of "fp8_static". What
    `rms_norm_rounded` has quantized is not quantized again.
    """
    if not to:
        return RoundedRows(x, x)
    form, given_scale, by_norm = getattr(x, "rounded", ("", None, None))
    if form == to and given_scale is scale:
        done: RoundedRows = by_norm
        return done
    if to in ("mxfp8", "mxfp4", "nvfp4"):
        return _round_scaled(x, to)
    rows, size = x.shape
    kind = to.partition("_")[0]
    given, each = kind != to, EACH[kind]
    if scale is not None:
        scales = scale.reshape(1)
    else:
        groups = 1 if given else cut(size, each)
        scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
        if given:
            _put_largest(x, scales, to)
    out = torch.empty(rows, size, dtype=KEPT[kind], device=x.device)
    block = _BLOCK if given else each
    launch(
        _round, (rows, cut(size, block)), x, x.stride(0), out, scales,
        scales.stride(0) if scales.dim() == 2 else 0, size,
        LARGEST=LARGEST[kind], WHOLE=kind == "int8", GIVEN=given, EACH=block,
    )  # fmt: skip
    return RoundedRows(out, scales)


def _put_largest(x: Tensor, to: Tensor, name: str) -> None:
    launch(_largest, (x.shape[0],), x, x.stride(0), to, x.shape[1], OVER=_OVER[name], BLOCK=1024)


def _round_scaled(x: Tensor, to: str) -> RoundedRows:
    """Quantize with a scale of one byte per group; K is whole groups."""
    rows, size = x.shape
    blocks = empty_blocks(x, to)
    out, factors = blocks.codes, blocks.factors
    if factors is not None:
        _put_largest(x, factors, to)
    launch(
        _round_blocks, (rows, cut(size, _BLOCK)), x, x.stride(0), out, out.stride(0),
        blocks.scales, x if factors is None else factors, size, blocks.scales.shape[1],
        PAIRS=to != "mxfp8", NESTED=factors is not None, GROUP=EACH[to], BLOCK=_BLOCK,
    )  # fmt: skip
    return blocks


def empty_blocks(x: Tensor, to: str) -> RoundedRows:
    """Return memory for x [T, K] in a format whose scales are bytes; K is whole groups."""
    rows, size = x.shape
    width = size if to == "mxfp8" else size // 2
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, cut(size, EACH[to]), dtype=torch.uint8, device=x.device)
    nested = to == "nvfp4"
    factors = torch.empty(rows, dtype=torch.float32, device=x.device) if nested else None
    return RoundedRows(codes, scales, factors)
