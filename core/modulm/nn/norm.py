"""Norms over the hidden dimension, plain or together with the residual addition before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from modulm.contracts.kernels import Ops

__all__ = ["LayerNorm", "Norm", "RMSNorm"]


class Norm(Module):
    """A norm. Layers call it as `norm(x)` or, before a branch of the residual stream, as `add`.

    One that takes `add` from here sets `ops`.
    """

    ops: Ops

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(residual + x), residual + x), both [tokens, hidden].

        `residual` is None at the first layer and may be overwritten afterwards. It may be fp32
        where the norm is an RMS norm.
        """
        if residual is None:
            return self(x), x
        residual = self.ops.add(residual, x)
        return self(residual), residual


class RMSNorm(Norm):
    """Zhang and Sennrich, arXiv 1910.07467. The weight is stored less `offset`.

    `Builder.rms_norm` makes one with a weight; made by itself it has none.
    """

    weight: Tensor | None

    def __init__(self, ops: Ops, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.ops, self.eps, self.offset = ops, eps, offset
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same shape."""
        normed: Tensor = self.ops.rms_norm(x, self.weight, self.eps, offset=self.offset)
        return normed

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(x), x
        normed = self.ops.add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)
        return normed, residual


class LayerNorm(Norm):
    """Ba et al., arXiv 1607.06450, with or without a bias."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, ops: Ops, eps: float) -> None:
        super().__init__()
        self.ops, self.eps = ops, eps
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same shape."""
        normed: Tensor = self.ops.layer_norm(x, self.weight, self.bias, self.eps)
        return normed
