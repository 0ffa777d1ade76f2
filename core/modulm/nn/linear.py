"""Linear layers; the quantization method keeps and applies the weight."""

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
    """y = x W^T + b, made by `Builder.linear`; x: [tokens, inputs] -> [tokens, outputs].

    `reduce` is the group over which the partial sums of a row-parallel layer are added.
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
        """The weight [outputs, inputs] in the layer's dtype; for layers whose weight is used
        otherwise than by `forward`. Raises UnsupportedError if the method cannot give it back.
        """
        bypassed(self.method)
        return self.method.dequantize(self, self.spec)


class Router(Linear):
    """Logits of experts: [tokens, hidden] -> [tokens, experts], in its own dtype."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = getattr(torch, self.spec.dtype)
        return super().forward(x if x.dtype == dtype else self.method.ops.cast(x, dtype))
