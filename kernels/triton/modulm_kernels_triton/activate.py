"""Elementwise activations, and products and sums with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.activations import NUMBERS, activated, sigmoid
from modulm_kernels_triton.launch import cut, launch
from modulm_kernels_triton.rows import dense_rows
from modulm_kernels_triton.tuning import tuned

__all__ = ["OPS", "activate", "add", "multiply"]


@triton.jit
def _activate(x, out, count, up, down, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    wide = tl.load(x + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, activated(wide, up, down, ACT).to(out.dtype.element_ty), inside)


@triton.jit
def _multiply(x, y, out, size, x_row, y_row, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    left = tl.load(x + row * x_row + at, inside, other=0.0)
    factor = tl.load(y + row * y_row + at, inside, other=0.0).to(tl.float32)
    factor = activated(factor, 0.0, 0.0, ACT).to(left.dtype).to(tl.float32)
    result = left.to(tl.float32) * factor
    tl.store(out + row * size + at, result.to(out.dtype.element_ty), inside)


@triton.jit
def _add(x, y, gate, out, size, x_row, y_row, gate_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    left = tl.load(x + row * x_row + at, inside, other=0.0).to(tl.float32)
    right = tl.load(y + row * y_row + at, inside, other=0.0).to(tl.float32)
    share = sigmoid(tl.load(gate + row * gate_row).to(tl.float32))
    tl.store(out + row * size + at, (left + share * right).to(out.dtype.element_ty), inside)


def activate(x: Tensor, act: str, constants: tuple[float, ...] = ()) -> Tensor:
    """The op `activate`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    up, down = constants or (0.0, 0.0)
    table = tuned("activate")
    launch(
        _activate, (cut(x.numel(), table["BLOCK"]),), x, out, x.numel(), float(up), float(down),
        ACT=NUMBERS[act], **table,
    )  # fmt: skip
    return out


def multiply(x: Tensor, y: Tensor, act: str = "") -> Tensor:
    """The op `multiply`; x, y: [T, H]."""
    left, right = dense_rows(x), dense_rows(y)
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    table, size = tuned("activate"), y.shape[-1]
    launch(
        _multiply, (len(right), cut(size, table["BLOCK"])), left, right, out, size,
        left.stride(0), right.stride(0), ACT=NUMBERS[act], **table,
    )  # fmt: skip
    return out


def add(x: Tensor, y: Tensor, gate: Tensor | None = None) -> Tensor:
    """The op `add`; x, y: [T, H], gate: [T, 1]. A sum without a gate is torch's."""
    if gate is None:
        return x + y
    left, right = dense_rows(x), dense_rows(y)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    table, size = tuned("activate"), x.shape[-1]
    launch(
        _add, (len(left), cut(size, table["BLOCK"])), left, right, gate, out, size,
        left.stride(0), right.stride(0), gate.stride(0), **table,
    )  # fmt: skip
    return out


OPS = {"activate": activate, "add": add, "multiply": multiply}
