"""Convolutions of encoders: torch's, in a type in which they are fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modulm_kernels_cpu.library import Library

__all__ = ["convolution_ops"]

#: What torch calls processors on which it convolves 16 bits by a plain loop of one thread.
_SLOW = ("DEFAULT", "NO AVX", "AVX2")


def convolution_ops(_: Library) -> dict[str, Callable[..., Any]]:
    """Return the ops of this module, which are the same for each level."""
    return {"convolve": _convolve}


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | tuple[int, ...],
    padding: int,
    groups: int,
) -> Tensor:
    dtype = x.dtype
    if _is_slow(dtype):
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    function = F.conv1d if weight.dim() == 3 else F.conv2d
    return function(x, weight, bias, stride, padding, 1, groups).to(dtype)


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    narrow = dtype in (torch.bfloat16, torch.float16)
    return narrow and torch.backends.cpu.get_cpu_capability() in _SLOW
