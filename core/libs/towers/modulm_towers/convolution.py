"""Convolutions over time, or over frequency and time."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["Convolution"]


class Convolution(Module):
    """A 1-D or 2-D convolution, replicated on every rank.

    kernel: its size along each axis. stride: of each axis, or of all. padding: the same for all.
    groups: channel groups.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        b: Builder,
        name: str,
        inputs: int,
        outputs: int,
        kernel: tuple[int, ...],
        *,
        stride: int | tuple[int, ...] = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        shapes = {"weight": (outputs, inputs // groups, *kernel)}
        b.parameters(name, self, **shapes, **({"bias": (outputs,)} if bias else {}))
        self.biased, self.stride, self.padding, self.groups = bias, stride, padding, groups

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, time] or [n, inputs, frequency, time] -> the same with `outputs` channels."""
        convolve = F.conv1d if self.weight.dim() == 3 else F.conv2d
        bias, weight, dtype = self.bias if self.biased else None, self.weight, x.dtype
        if x.is_cpu and _is_slow(dtype):
            x, weight = x.float(), weight.float()
            bias = None if bias is None else bias.float()
        return convolve(x, weight, bias, self.stride, self.padding, 1, self.groups).to(dtype)


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether torch convolves in this type by a plain loop of one thread, here on the CPU."""
    narrow = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2")
    return narrow and dtype in (torch.bfloat16, torch.float16)
