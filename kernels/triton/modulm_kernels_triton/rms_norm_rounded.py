"""RMS norm, also after adding to a residual, that quantizes its result for the product after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.round_rows import EACH, KEPT, LARGEST, RoundedRows, nearest_numbers
from modulm_kernels_triton.tuning import tuned
from modulm_kernels_triton.weights import need

__all__ = ["OPS", "rms_norm_rounded"]

#: Formats of `modulm_quantized.ACTIVATION_FORMATS`: those of bytes with fp32 scales.
_FORMATS = ("int8", "fp8", "fp8_token", "fp8_static")


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
    inside = at < size
    wide = tl.load(x + row * x_row + at, inside, other=0.0).to(tl.float32)
    if ADD:
        target = residual + row * residual_row + at
        before = tl.load(target, inside, other=0.0)
        total = (before.to(tl.float32) + wide).to(before.dtype)
        tl.store(target, total, inside)
        wide = total.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    wide = wide * (tl.load(weight + at, inside, other=0.0).to(tl.float32) + offset)
    kept = wide.to(out.dtype.element_ty)
    tl.store(out + row * size + at, kept, inside)
    grouped = tl.reshape(kept.to(tl.float32), (GROUPS, EACH))
    if STATIC:
        ratio = grouped / tl.load(scales)
    else:
        scale = tl.maximum(tl.max(tl.abs(grouped), 1), 1e-12) / LARGEST
        group = tl.arange(0, GROUPS)
        tl.store(scales + row * groups + group, scale, group < groups)
        ratio = grouped / scale[:, None]
    numbers = nearest_numbers(tl.reshape(ratio, (BLOCK,)), LARGEST, WHOLE)
    tl.store(codes + row * size + at, numbers.to(codes.dtype.element_ty), inside)


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

    form: "int8", "fp8", "fp8_token" or "fp8_static", whose scale is one fp32 number.
    """
    need(form in _FORMATS, f"form must be one of {', '.join(_FORMATS)}, not {form!r}")
    (rows, size), kind = x.shape, form.partition("_")[0]
    whole_rows = kind != form
    block = power_of_two(size)
    each = block if whole_rows else EACH[kind]
    block = max(block, each)
    groups = 1 if whole_rows else cut(size, each)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    codes = torch.empty(x.shape, dtype=KEPT[kind], device=x.device)
    if scale is None:
        scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    else:
        scales = scale.reshape(1)
    launch(
        _rms_norm_rounded, (rows,),
        x, x if residual is None else residual, weight, out, codes, scales,
        x.stride(0), 0 if residual is None else residual.stride(0), size, groups, eps, offset,
        ADD=residual is not None, STATIC=scale is not None, EACH=each, LARGEST=LARGEST[kind],
        WHOLE=kind == "int8", BLOCK=block, **tuned("rms_norm", BLOCK=block),
    )  # fmt: skip
    out.rounded = form, scale, RoundedRows(codes, scales)  # type: ignore[attr-defined]
    return out


OPS = {"rms_norm_rounded": rms_norm_rounded}
