"""Comparison of a kernel's result with its twin's."""

from __future__ import annotations

import torch
from torch import Tensor

#: Relative error of one rounding, with some room for fp32 sums taken in another order.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def poisoned(*sizes: int, dtype: torch.dtype) -> Tensor:
    """An output in which an element that was not written is NaN."""
    return torch.full(sizes, torch.nan, dtype=dtype)


def assert_close(got: Tensor, wanted: Tensor, factor: float = 1.0) -> None:
    """Equal up to rounding of the dtype, absolute for values below 1."""
    assert got.dtype == wanted.dtype
    tolerance = _TOLERANCE[got.dtype] * factor
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
