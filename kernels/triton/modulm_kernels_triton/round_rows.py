"""Round activations to bytes, with a scale per group of a row's numbers.

Numbers are brought to values of the smaller format before conversion, so the result does not depend
on how the device or the interpreter rounds.
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
    """Return the nearest multiple of `large`'s last bit; ties to even."""
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
        rounded_bits = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20
        normal = rounded_bits.to(tl.float32, bitcast=True)
        wide = tl.where(tl.abs(wide) < 0.015625, _nearest(wide, 24576.0), normal)
    tl.store(out + row * size + at, wide.to(out.dtype.element_ty), inside)
    tl.store(scales + row * groups + group, scale)


def round_rows(x: Tensor, to: str) -> tuple[Tensor, Tensor]:
    """Round x [T, K] with dense rows to (bytes [T, K], scales [T, groups] fp32): `to` "int8" with a
    scale per 256 numbers, "fp8" with one per 128; (x, x) for "".
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
