"""Gated activations: the activation of one half of each row times the other half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.activations import NUMBERS, activated
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.rows import dense_rows
from modulm_kernels_triton.tuning import tuned

__all__ = ["OPS", "act_and_mul"]


@triton.jit
def _act_and_mul(x, out, size, x_row, out_row, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * x_row + at, inside, other=0.0)
    up = tl.load(x + row * x_row + size + at, inside, other=0.0)
    act = activated(gate.to(tl.float32), 0.0, 0.0, ACT).to(gate.dtype)
    result = act.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * out_row + at, result.to(out.dtype.element_ty), inside)


def act_and_mul(x: Tensor, act: str, out: Tensor | None = None) -> Tensor:
    """The op `act_and_mul`; x: [T, 2 I] -> [T, I]."""
    rows, size = dense_rows(x), x.shape[-1] // 2
    result = (
        torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device) if out is None else out
    )
    flat = result.view(-1, size)
    constants = dict(tuned("act_and_mul"))
    block = min(power_of_two(size), constants.pop("BLOCK"))
    launch(
        _act_and_mul, (len(rows), cut(size, block)), rows, flat, size, rows.stride(0),
        flat.stride(0), ACT=NUMBERS[act], BLOCK=block, **constants,
    )  # fmt: skip
    return result


OPS = {"act_and_mul": act_and_mul}
