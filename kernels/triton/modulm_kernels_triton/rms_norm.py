"""RMS norm, alone and after adding to a residual: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.launch import launch, power_of_two
from modulm_kernels_triton.norm_rows import added_row, unit_row, weighted_row
from modulm_kernels_triton.rows import grouped
from modulm_kernels_triton.tuning import tuned

__all__ = ["OPS", "add_rms_norm", "rms_norm"]


@triton.jit
def _rms_norm(
    x, residual, weight, out,
    rows_in_group, x_group, x_row, residual_row, out_row,
    size, eps, offset,
    ADD: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    start = row // rows_in_group * x_group + row % rows_in_group * x_row
    wide = added_row(x + start + at, residual + row * residual_row + at, inside, ADD)
    wide = unit_row(wide, size, eps)
    if WEIGHT:
        wide = weighted_row(wide, weight + at, inside, offset)
    tl.store(out + row * out_row + at, wide.to(out.dtype.element_ty), inside)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """The op `rms_norm`; x: [T, H] or [T, n, H] with dense rows."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _start(x, None, weight, result, eps, offset)
    return result


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    offset: float = 0.0,
) -> Tensor:
    """The op `add_rms_norm`; x, residual: [T, H] with dense rows."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _start(x, residual, weight, result, eps, offset)
    return result


def _start(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    eps: float,
    offset: float,
) -> None:
    size = x.shape[-1]
    x, rows_in_group, group, row = grouped(x)
    flat = out.view(-1, size)
    block = power_of_two(size)
    launch(
        _rms_norm, (flat.shape[0],),
        x, x if residual is None else residual, x if weight is None else weight, flat,
        rows_in_group, group, row, 0 if residual is None else residual.stride(0), flat.stride(0),
        size, eps, offset,
        ADD=residual is not None, WEIGHT=weight is not None, BLOCK=block,
        **tuned("rms_norm", BLOCK=block),
    )  # fmt: skip


OPS = {"add_rms_norm": add_rms_norm, "rms_norm": rms_norm}
