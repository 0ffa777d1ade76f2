"""Comparison of a kernel's result with its twin's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

#: What is tested without a GPU as well: the interpreter's products are wrong in bfloat16.
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available() or torch.xpu.is_available():
    DTYPES.append(torch.bfloat16)
_LEFT_OUT = pytest.mark.skipif(
    torch.bfloat16 not in DTYPES, reason="bfloat16 needs a GPU: the interpreter's is wrong"
)
each_dtype = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=_LEFT_OUT)],
    ids=lambda dtype: str(dtype)[6:],
)

_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close(got: Tensor, wanted: Tensor, factor: float = 1.0) -> None:
    """Equal up to rounding of the dtype, absolute for values below 1."""
    assert got.dtype == wanted.dtype
    tolerance = _TOLERANCE[got.dtype] * factor
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def poisoned(*sizes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An output in which an element that was not written is NaN."""
    return torch.full(sizes, torch.nan, dtype=dtype, device=device)


def strided(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows that are dense but not adjacent."""
    return torch.randn(rows, size + 3).to(device, dtype)[:, :size]
