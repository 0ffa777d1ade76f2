"""Linear layers; the quantization method stores and applies the weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from modulm.nn.adapted import bypassed

if TYPE_CHECKING:
    from modulm.contracts.quantization import LinearSpec, QuantizationMethod
    from modulm.parallel import ProcessGroup

__all__ = ["Linear", "Router"]


class Linear(Module):
    """y = x W^T + b, created by `Builder.linear`; x: [tokens, inputs] -> [tokens, outputs].

    reduce: the group over which partial sums of a row-parallel layer are added.
    """

    bias: Tensor | None

    def __init__(
        self, spec: LinearSpec, method: QuantizationMethod, reduce: ProcessGroup | None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.method = method
        self.reduce = reduce
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, inputs] -> [tokens, outputs of this rank]."""
        if self.reduce is None:
            return self.method.apply(self, x, self.bias)
        bias = self.bias if self.reduce.rank == 0 else None
        return self.reduce.all_reduce(self.method.apply(self, x, bias))

    def dequantize(self) -> Tensor:
        """Return the weight [outputs, inputs] in the layer's dtype, for uses besides `forward`.

        Raises UnsupportedError if the quantization method cannot.
        """
        bypassed(self.method)
        return self.method.dequantize(self, self.spec)


class Router(Linear):
    """Computes router logits: [tokens, hidden] -> [tokens, experts], in the router's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = getattr(torch, self.spec.dtype)
        return super().forward(x if x.dtype == dtype else self.method.ops.cast(x, dtype))
