"""Checks of tensors before their addresses are passed to C; each error names the argument."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CODES", "contiguous", "dense_rows", "dtype_code", "need", "shape"]

#: Codes of element types in the C ABI (src/base/types.h).
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def need(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def dtype_code(name: str, x: Tensor) -> int:
    """Return the code of x's dtype."""
    try:
        return CODES[x.dtype]
    except KeyError:
        raise ValueError(
            f"{name} must be float32, bfloat16 or float16, not {str(x.dtype)[6:]}"
        ) from None


def dense_rows(name: str, x: Tensor) -> int:
    """Return the row stride of x [rows, size], whose rows must be dense."""
    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"{name} must be [rows, size] with dense rows, not {_describe(x)}")
    return x.stride(0)


def contiguous(name: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless x is contiguous, on the CPU, and of `dtype`."""
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not {_describe(x)}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} must be {str(dtype)[6:]}, not {str(x.dtype)[6:]}")


def shape(name: str, x: Tensor, *sizes: int) -> None:
    """Raise ValueError unless x has exactly these sizes."""
    if x.shape != sizes:
        raise ValueError(f"{name} must be {list(sizes)}, not {_describe(x)}")


def _describe(x: Tensor) -> str:
    return f"{list(x.shape)} with strides {list(x.stride())}"
