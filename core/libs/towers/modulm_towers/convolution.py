"""Convolutions over time, or over frequency and time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["Convolution", "convolve"]


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
        self.ops: Any = b.ops
        self.biased, self.stride, self.padding, self.groups = bias, stride, padding, groups

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, time] or [n, inputs, frequency, time] -> the same with `outputs` channels."""
        bias = self.bias if self.biased else None
        y: Tensor = self.ops.convolve(x, self.weight, bias, self.stride, self.padding, self.groups)
        return y


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | tuple[int, ...],
    padding: int,
    groups: int,
) -> Tensor:
    """Arguments and result of torch's conv1d, or of conv2d if the weight has four dimensions."""
    function = F.conv1d if weight.dim() == 3 else F.conv2d
    return function(x, weight, bias, stride, padding, 1, groups)
