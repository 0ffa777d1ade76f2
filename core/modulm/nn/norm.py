"""Norms over the hidden dimension, alone or fused with the residual addition before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from modulm.contracts.kernels import Ops

__all__ = ["LayerNorm", "Norm", "RMSNorm"]


class Norm(Module):
    """Base class of norms: `norm(x)`, or `norm.add(x, residual)` in a residual stream.

    Subclasses that inherit `add` must set `ops`.
    """

    ops: Ops

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(residual + x), residual + x), both [tokens, hidden].

        residual: None at the first layer; may be overwritten; may be fp32 for RMS norms.
        """
        if residual is None:
            return self(x), x
        residual = self.ops.add(residual, x)
        return self(residual), residual


class RMSNorm(Norm):
    """RMS norm (Zhang and Sennrich, arXiv 1910.07467). The stored weight excludes `offset`.

    `Builder.rms_norm` creates one with a weight; created directly it has none.
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
    """Layer norm (Ba et al., arXiv 1607.06450), with or without a bias."""

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
