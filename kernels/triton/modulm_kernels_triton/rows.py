"""Rows of tensors that are not contiguous."""

from __future__ import annotations

from torch import Tensor

__all__ = ["dense_rows", "grouped"]


def grouped(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return (x with dense rows, rows per group, group stride, row stride).

    x: [rows, size] or [groups, rows, size].

    Row i is at i // (rows per group) * group stride + i % (rows per group) * row stride. x is
    copied only if its last dimension is not dense.
    """
    if x.dim() > 3 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        x = x.reshape(-1, x.shape[-1]).contiguous()
    if x.dim() == 3:
        return x, max(x.shape[1], 1), x.stride(0), x.stride(1)
    rows = x.view(-1, x.shape[-1])
    return rows, 1, rows.stride(0), 0


def dense_rows(x: Tensor) -> Tensor:
    """Return x as [rows, size] with dense rows; copied only if necessary."""
    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
        return x.reshape(-1, x.shape[-1]).contiguous()
    return x
