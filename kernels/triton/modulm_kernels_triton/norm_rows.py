"""What kernels of RMS norms share: one program has a row, or a part of one, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["added_row", "unit_row", "weighted_row"]


@triton.jit
def added_row(x, residual, inside, ADD: tl.constexpr):
    """Return the numbers at `x` in fp32. ADD: plus those at `residual`, which become the sum."""
    wide = tl.load(x, inside, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual, inside, other=0.0)
        total = (before.to(tl.float32) + wide).to(before.dtype)
        tl.store(residual, total, inside)
        wide = total.to(tl.float32)
    return wide


@triton.jit
def unit_row(wide, size, eps):
    """Return x / sqrt(mean(x^2) + eps) of a row of `size` numbers; the rest of it is 0."""
    return wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)


@triton.jit
def weighted_row(wide, weight, inside, offset):
    """Return the row times (weight + offset)."""
    return wide * (tl.load(weight, inside, other=0.0).to(tl.float32) + offset)
