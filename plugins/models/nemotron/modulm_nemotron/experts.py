"""Experts without a gate: two linear layers with an activation between them.

The op `fused_experts` supports gated experts only, so these are separate linear layers, of which a
step runs the chosen ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.nn import Builder
from modulm_layers import PlainMLP, Routing

__all__ = ["PlainExperts"]


class PlainExperts(Module):
    """`experts` ungated feed-forward blocks of width `inner` on vectors of `width`.

    The router reads vectors of `hidden`; a stored bias is added to its scores for the selection
    only.
    """

    choice_bias: Tensor

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
        self.ops, self.routing = b.ops, routing
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
        r = self.routing
        weights, ids = self.ops.moe_route(
            self.router(seen),
            r.top_k,
            scoring=r.scoring,
            renormalise=r.renormalise,
            bias=self.choice_bias,
            groups=r.groups,
            top_groups=r.top_groups,
            group_score=r.group_score,
            scale=r.scale,
        )
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            expert_output = self.experts[expert](x[rows]).float()
            total.index_add_(0, rows, expert_output * weights[rows, choices, None])
        return total.to(x.dtype)
