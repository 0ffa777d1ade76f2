"""Feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module

from modulm_layers.activation import activation, gated

if TYPE_CHECKING:
    from modulm.nn.builder import Builder

__all__ = ["GatedMLP", "PlainMLP"]


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202), gate and up as one layer.

    down_bias: whether `down` has a bias; None means as the others. outputs: columns of the result,
    None for as many as of the input.
    """

    def __init__(
        self,
        b: Builder,
        hidden: int,
        inner: int,
        act: str = "silu",
        *,
        bias: bool = False,
        down_bias: bool | None = None,
        gate: str = "gate_proj",
        up: str = "up_proj",
        down: str = "down_proj",
        fused: str = "gate_up_proj",
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = b.linear(fused, hidden, {gate: inner, up: inner}, bias=bias)
        self.act = gated(act, b.ops)
        down_bias = bias if down_bias is None else down_bias
        self.down = b.row_linear(down, inner, outputs or hidden, bias=down_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, outputs]; outputs defaults to hidden."""
        out: Tensor = self.down(self.act(self.gate_up(x)))
        return out


class PlainMLP(Module):
    """down(act(up(x)))."""

    def __init__(
        self,
        b: Builder,
        hidden: int,
        inner: int,
        act: str,
        *,
        bias: bool = True,
        up: str = "up_proj",
        down: str = "down_proj",
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.up = b.linear(up, hidden, inner, bias=bias)
        self.act = activation(act, b.ops)
        self.down = b.row_linear(down, inner, outputs or hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, outputs]; outputs defaults to hidden."""
        out: Tensor = self.down(self.act(self.up(x)))
        return out
