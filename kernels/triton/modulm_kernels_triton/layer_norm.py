"""Layer norm: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.launch import launch, power_of_two
from modulm_kernels_triton.rows import grouped
from modulm_kernels_triton.tuning import tuned

__all__ = ["OPS", "layer_norm"]


@triton.jit
def _layer_norm(
    x, weight, bias, out, rows_in_group, x_group, x_row, weight_rows, weight_row, out_row, size,
    eps, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    start = row // rows_in_group * x_group + row % rows_in_group * x_row
    wide = tl.load(x + start + at, inside, other=0.0).to(tl.float32)
    wide = tl.where(inside, wide - tl.sum(wide, 0) / size, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    if WEIGHT:
        source = weight + row % weight_rows * weight_row + at
        wide = wide * tl.load(source, inside, other=0.0).to(tl.float32)
    if BIAS:
        wide = wide + tl.load(bias + at, inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + at, wide.to(out.dtype.element_ty), inside)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    """The op `layer_norm`; x: [T, H], or [T, n, H] with weight [H] or [n, H]."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    size = x.shape[-1]
    x, rows_in_group, group, row = grouped(x)
    flat = result.view(-1, size)
    each = weight is not None and weight.dim() == 2
    block = power_of_two(size)
    launch(
        _layer_norm, (len(flat),), x, x if weight is None else weight, x if bias is None else bias,
        flat, rows_in_group, group, row, len(weight) if each else 1,
        weight.stride(0) if each else 0, flat.stride(0), size, eps, WEIGHT=weight is not None,
        BIAS=bias is not None, BLOCK=block, **tuned("rms_norm", BLOCK=block),
    )  # fmt: skip
    return result


OPS = {"layer_norm": layer_norm}
