"""Experts without a gate: two linear layers with an activation between them.

The op `fused_experts` supports gated experts only, so these are separate linear layers, of which a
step runs the chosen ones.
"""

from __future__ import annotations

import torch
from attrs import asdict
from torch import Tensor
from torch.nn import ModuleList

from modulm.nn import Builder
from modulm_layers import ExpertChoice, PlainMLP, Routing

__all__ = ["PlainExperts"]


class PlainExperts(ExpertChoice):
    """`experts` ungated feed-forward blocks of width `inner` on vectors of `width`.

    The router reads vectors of `hidden`; a stored bias is added to its scores for the selection
    only.
    """

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        width: int,
        inner: int,
        experts: int,
        routing: Routing,
        act: str,
    ) -> None:
        super().__init__()
        self.ops, self.routing = b.ops, asdict(routing)
        self.router = b.router("gate", hidden, experts, wide=True)
        bias = "gate.e_score_correction_bias"
        b.parameter(bias, self, "choice_bias", (experts,), torch.float32)
        self.experts = ModuleList(
            PlainMLP(b.at(f"experts.{i}"), width, inner, act, bias=False) for i in range(experts)
        )

    def forward(self, seen: Tensor, x: Tensor) -> Tensor:
        """seen: [tokens, hidden], the router's input; x: [tokens, width] -> the same shape.

        A token's experts are summed in index order, in fp32.
        """
        weights, ids = self.choose(self.router(seen))
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            expert_output = self.experts[expert](x[rows]).float()
            total.index_add_(0, rows, expert_output * weights[rows, choices, None])
        return total.to(x.dtype)
