"""Convolutions over time, or over time and frequency."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["Convolution"]


class Convolution(Module):
    """A convolution of one axis or of two, every rank does all of it; kernel: its length along
    each; stride, padding: along all; groups: of channels that stay among themselves.
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
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        shapes = {"weight": (outputs, inputs // groups, *kernel)}
        b.parameters(name, self, **shapes, **({"bias": (outputs,)} if bias else {}))
        self.biased, self.stride, self.padding, self.groups = bias, stride, padding, groups

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, inputs, time] or [n, inputs, frequency, time] -> the same of outputs."""
        convolve = F.conv1d if self.weight.dim() == 3 else F.conv2d
        bias = self.bias if self.biased else None
        return convolve(x, self.weight, bias, self.stride, self.padding, 1, self.groups)
