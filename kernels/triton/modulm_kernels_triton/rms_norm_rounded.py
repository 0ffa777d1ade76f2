"""RMS norm, also after adding to a residual, that quantizes its result for the product after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.kept_numbers import bytes_of_float8
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.narrow_floats import codes_of_e2m1
from modulm_kernels_triton.norm_rows import added_row, unit_row, weighted_row
from modulm_kernels_triton.round_rows import (
    EACH,
    KEPT,
    LARGEST,
    RoundedRows,
    block_scales,
    empty_blocks,
    nearest_numbers,
)
from modulm_kernels_triton.tuning import tuned
from modulm_kernels_triton.weights import need

__all__ = ["FORMATS", "OPS", "rms_norm_rounded"]

#: Formats of `modulm_quantized.ACTIVATION_FORMATS` by the scales of their kernels.
_WIDE_SCALES = ("int8", "fp8", "fp8_token", "fp8_static")
_BYTE_SCALES = ("mxfp8", "mxfp4", "nvfp4")
FORMATS = (*_WIDE_SCALES, *_BYTE_SCALES)


@triton.jit
def _normed(
    x, residual, weight, out, row, at, x_row, residual_row, size, eps, offset, ADD: tl.constexpr
):  # fmt: skip
    """Compute and store a row of the norm; return its numbers as they are stored, in fp32."""
    inside = at < size
    wide = added_row(x + row * x_row + at, residual + row * residual_row + at, inside, ADD)
    wide = weighted_row(unit_row(wide, size, eps), weight + at, inside, offset)
    kept = wide.to(out.dtype.element_ty)
    tl.store(out + row * size + at, kept, inside)
    return kept.to(tl.float32)


@triton.jit
def _rms_norm_rounded(
    x, residual, weight, out, codes, scales, x_row, residual_row, size, groups, eps, offset,
    ADD: tl.constexpr, STATIC: tl.constexpr, EACH: tl.constexpr, LARGEST: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """EACH: numbers that share a scale, BLOCK for a whole row. STATIC: `scales` is one number."""
    GROUPS: tl.constexpr = BLOCK // EACH
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    kept = _normed(
        x, residual, weight, out, row, at, x_row, residual_row, size, eps, offset, ADD
    )  # fmt: skip
    grouped = tl.reshape(kept, (GROUPS, EACH))
    if STATIC:
        ratio = grouped / tl.load(scales)
    else:
        scale = tl.maximum(tl.max(tl.abs(grouped), 1), 1e-12) / LARGEST
        group = tl.arange(0, GROUPS)
        tl.store(scales + row * groups + group, scale, group < groups)
        ratio = grouped / scale[:, None]
    numbers = nearest_numbers(tl.reshape(ratio, (BLOCK,)), LARGEST, WHOLE)
    tl.store(codes + row * size + at, numbers.to(codes.dtype.element_ty), at < size)


@triton.jit
def _rms_norm_blocks(
    x, residual, weight, out, codes, scales, factors, x_row, residual_row, size, groups, eps,
    offset, ADD: tl.constexpr, PAIRS: tl.constexpr, NESTED: tl.constexpr, EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for formats whose scales are bytes. PAIRS: of e2m1 in a byte. NESTED: rows have
    factors as well.
    """
    GROUPS: tl.constexpr = BLOCK // EACH
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    kept = _normed(
        x, residual, weight, out, row, at, x_row, residual_row, size, eps, offset, ADD
    )  # fmt: skip
    grouped = tl.reshape(kept, (GROUPS, EACH))
    whole = 1.0
    if NESTED:
        whole = tl.maximum(tl.max(tl.abs(kept), 0), 1e-12) / 2688.0
        tl.store(factors + row, whole)
    stored, scale = block_scales(tl.max(tl.abs(grouped), 1), whole, PAIRS, NESTED)
    group = tl.arange(0, GROUPS)
    tl.store(scales + row * groups + group, stored, group < groups)
    ratio = grouped / scale[:, None]
    if PAIRS:
        even, odd = tl.split(tl.reshape(codes_of_e2m1(ratio), (BLOCK // 2, 2)))
        pair = tl.arange(0, BLOCK // 2)
        tl.store(codes + row * (size // 2) + pair, even | (odd << 4), pair * 2 < size)
    else:
        numbers = bytes_of_float8(tl.reshape(ratio, (BLOCK,)), 3, 7, 448.0)
        tl.store(codes + row * size + at, numbers, at < size)


def rms_norm_rounded(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    form: str,
    scale: Tensor | None = None,
    offset: float = 0.0,
) -> Tensor:
    """The op `rms_norm_rounded` (twin: modulm_quantized.norms); x: [T, H] with dense rows.

    form: one of FORMATS. scale: one fp32 number, for "fp8_static".
    """
    need(form in FORMATS, f"form must be one of {', '.join(FORMATS)}, not {form!r}")
    (rows, size), kind = x.shape, form.partition("_")[0]
    whole_rows = kind != form
    block = power_of_two(size)
    each = block if whole_rows else EACH[kind]
    block = max(block, each)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    before, added = x if residual is None else residual, residual is not None
    strides = x.stride(0), before.stride(0) if added else 0
    meta = {"ADD": added, "EACH": each, "BLOCK": block, **tuned("rms_norm", BLOCK=block)}
    if form in _BYTE_SCALES:
        need(size % each == 0, f"rows must have whole groups of {each}, not {size} numbers")
        rounded = empty_blocks(x, form)
        factors = x if rounded.factors is None else rounded.factors
        launch(
            _rms_norm_blocks, (rows,), x, before, weight, out, rounded.codes, rounded.scales,
            factors, *strides, size, size // each, eps, offset,
            PAIRS=form != "mxfp8", NESTED=form == "nvfp4", **meta,
        )  # fmt: skip
    else:
        groups = 1 if whole_rows else cut(size, each)
        scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
        codes = torch.empty(x.shape, dtype=KEPT[kind], device=x.device)
        rounded = RoundedRows(codes, scales if scale is None else scale.reshape(1))
        launch(
            _rms_norm_rounded, (rows,), x, before, weight, out, codes, rounded.scales,
            *strides, size, groups, eps, offset,
            STATIC=scale is not None, LARGEST=LARGEST[kind], WHOLE=kind == "int8", **meta,
        )  # fmt: skip
    out.rounded = form, scale, rounded  # type: ignore[attr-defined]
    return out


OPS = {"rms_norm_rounded": rms_norm_rounded}
