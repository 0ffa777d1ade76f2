"""RMS norm of parts of a row, with a gate before or after: one program per part."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.activations import sigmoid
from modulm_kernels_triton.launch import launch, power_of_two
from modulm_kernels_triton.norm_rows import unit_row, weighted_row
from modulm_kernels_triton.rows import dense_rows
from modulm_kernels_triton.tuning import tuned

__all__ = ["OPS", "gated_rms_norm"]


@triton.jit
def _gated_rms_norm(
    x, gate, weight, out, x_row, gate_row, weight_part, size, eps, FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < size
    wide = tl.load(x + row * x_row + part * size + at, inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + row * gate_row + part * size + at, inside, other=0.0).to(tl.float32)
    factor = factor * sigmoid(factor)
    if not FIRST:
        wide = wide * factor
    wide = unit_row(wide, size, eps)
    wide = weighted_row(wide, weight + part * weight_part + at, inside, 0.0)
    if FIRST:
        wide = wide * factor
    target = out + row * size * tl.num_programs(1) + part * size + at
    tl.store(target, wide.to(out.dtype.element_ty), inside)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, *, norm_first: bool
) -> Tensor:
    """The op `gated_rms_norm`; x, gate: [T, H]; weight: [H] or [H / groups]."""
    rows, gates, size = dense_rows(x), dense_rows(gate), x.shape[-1] // groups
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    block = power_of_two(size)
    launch(
        _gated_rms_norm, (len(rows), groups), rows, gates, weight, out, rows.stride(0),
        gates.stride(0), size if len(weight) > size else 0, size, eps, FIRST=norm_first,
        BLOCK=block, **tuned("rms_norm", BLOCK=block),
    )  # fmt: skip
    return out


OPS = {"gated_rms_norm": gated_rms_norm}
