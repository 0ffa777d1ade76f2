"""Activations rounded to bytes, with a scale for each row and so many of its numbers.

They are brought to numbers of the smaller format before they are converted, so that it does not
matter how the device, or the interpreter, would round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.launch import cut, launch

__all__ = ["round_rows"]

_EACH = {"int8": 256, "fp8": 128}
_KEPT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0}


@triton.jit
def _nearest(x, large):
    """The nearest multiple of `large`'s last bit; of two, the even one."""
    return (x + large) - large


@triton.jit
def _round(
    x, x_row, out, scales, size, groups,
    LARGEST: tl.constexpr, WHOLE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = group * EACH + tl.arange(0, EACH)
    inside = at < size
    wide = tl.load(x + row * x_row + at, inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / LARGEST
    wide = wide / scale
    wide = tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
    if WHOLE:
        wide = _nearest(wide, 12582912.0)
    else:
        bits = wide.to(tl.int32, bitcast=True)
        kept = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20
        normal = kept.to(tl.float32, bitcast=True)
        wide = tl.where(tl.abs(wide) < 0.015625, _nearest(wide, 24576.0), normal)
    tl.store(out + row * size + at, wide.to(out.dtype.element_ty), inside)
    tl.store(scales + row * groups + group, scale)


def round_rows(x: Tensor, to: str) -> tuple[Tensor, Tensor]:
    """x: [T, K] with dense rows -> (bytes [T, K], scales [T, groups] fp32), for `to` "int8" with a
    scale for 256 numbers and "fp8" with one for 128; (x, x) for "".
    """
    if not to:
        return x, x
    each, (rows, size) = _EACH[to], x.shape
    out = torch.empty(rows, size, dtype=_KEPT[to], device=x.device)
    scales = torch.empty(rows, cut(size, each), dtype=torch.float32, device=x.device)
    launch(
        _round, (rows, scales.shape[1]), x, x.stride(0), out, scales, size, scales.shape[1],
        LARGEST=_LARGEST[to], WHOLE=to == "int8", EACH=each,
    )  # fmt: skip
    return out, scales
