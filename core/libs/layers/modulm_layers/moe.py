"""Mixture of experts: the router, its settings and the fused experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from attrs import asdict, frozen
from torch import Tensor
from torch.nn import Module

from modulm_layers.activation import gate_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from modulm.nn.builder import Builder

__all__ = ["ExpertChoice", "ExpertNames", "Gate", "MoE", "RouteTap", "Routing"]


@frozen
class Routing:
    """How tokens choose experts; the fields are the arguments of the op `moe_route`."""

    top_k: int
    scoring: str = "softmax"
    renormalise: bool = True
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scale: float = 1.0

    def check(self, experts: int) -> None:
        """Raise ValueError, with the usual keys of config.json, if the settings do not fit."""
        each, rest = divmod(experts, self.groups)
        if rest or (self.groups > 1 and self.group_score == "top2" and each < 2):
            raise ValueError(f"n_group: {experts} experts in {self.groups} groups")
        if self.top_groups > self.groups:
            raise ValueError(f"topk_group: {self.top_groups} of {self.groups} groups")
        if self.top_k > each * self.top_groups:
            raise ValueError(f"num_experts_per_tok: {self.top_k} of {each * self.top_groups}")


@frozen
class Gate:
    """The function between an expert's two maps; the fields are arguments of `fused_experts`."""

    act: str
    alpha: float = 1.0
    limit: float = 0.0


@frozen
class ExpertNames:
    """Names of the router's and the experts' weights in a checkpoint."""

    router: str = "gate"
    one: str = "experts.{expert}.{part}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up_stack: str = "experts.gate_up_proj"
    down_stack: str = "experts.down_proj"
    gate_up_bias: str | None = None
    down_bias: str | None = None
    choice_bias: str = "gate.e_score_correction_bias"


_NAMES = ExpertNames()


class RouteTap(Protocol):
    """Sees what the router of one layer chose, and may replace it."""

    def __call__(
        self,
        logits: Tensor,
        weights: Tensor,
        ids: Tensor,
        weigh: Callable[[Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the weights [tokens, top_k] fp32 and expert ids [tokens, top_k] to use.

        logits: [tokens, experts]. weigh: returns the weights of other ids, from the same logits.
        """


class ExpertChoice(Module):
    """A block whose router chooses experts for each token.

    routing: the fields of `Routing`. tap: see `RouteTap`; None, the default, costs nothing.
    """

    ops: Any
    router: Any
    routing: dict[str, Any]
    choice_bias: Tensor | None
    tap: RouteTap | None = None

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [tokens, experts] -> weights [tokens, top_k] fp32 and expert ids, as tapped."""
        weights, ids = self.route(logits)
        return (weights, ids) if self.tap is None else self.tap(logits, weights, ids, self.weigh)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [tokens, experts] -> weights [tokens, top_k] fp32 and expert ids."""
        chosen: Any = self.ops.moe_route(logits, bias=self.choice_bias, **self.routing)
        return chosen  # type: ignore[no-any-return]

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the weights that `route` would give these experts: [tokens, top_k] fp32."""
        settings, wide = self.routing, logits.float()
        scores = wide.softmax(-1) if settings["scoring"] == "softmax" else wide.sigmoid()
        weights = scores.gather(-1, ids.long())
        if settings["renormalise"]:
            weights = weights / weights.sum(-1, keepdim=True)
        scaled: Tensor = weights * settings["scale"]
        return scaled


class MoE(ExpertChoice):
    """Sparse gated feed-forward experts (Shazeer et al., arXiv 1701.06538).

    `wide_router` computes the router in fp32, for models whose expert scores lie close together.
    `choice_bias` adds a stored bias to the scores used for choosing, not to the weights. `act` is
    an activation's name in config.json, or a `Gate`. `shared` is a block that every token takes in
    addition (Dai et al., arXiv 2401.06066). `identities` more experts, the last ones for the
    router, return their input (arXiv 2410.07348).
    """

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        inner: int,
        experts: int,
        routing: Routing,
        identities: int = 0,
        act: str | Gate = "silu",
        router_bias: bool = False,
        wide_router: bool = False,
        choice_bias: bool = False,
        shared: Module | None = None,
        names: ExpertNames = _NAMES,
    ) -> None:
        super().__init__()
        self.ops, self.routing = b.ops, asdict(routing)
        choices = experts + identities
        self.router = b.router(names.router, hidden, choices, bias=router_bias, wide=wide_router)
        self.first_identity = experts if identities else None
        sizes = {names.gate: inner, names.up: inner}
        self.gate_up = b.experts(
            names.gate_up_stack, experts, hidden, sizes, names.one, bias=names.gate_up_bias
        )
        self.down = b.experts(
            names.down_stack,
            experts,
            inner,
            {names.down: hidden},
            names.one,
            bias=names.down_bias,
            rows=True,
        )
        self.fused_experts = b.fused_experts(self.gate_up, self.down)
        expert_shard, ranks = self.down.spec.expert_shard, self.down.reduce
        # Only one of the ranks that share an expert adds its bias.
        self.adds_bias = ranks is None or ranks.first or expert_shard.size < expert_shard.total
        self.shared = shared
        self.gate = asdict(Gate(gate_name(act)) if isinstance(act, str) else act)
        self.register_parameter("choice_bias", None)
        if choice_bias:
            b.parameter(names.choice_bias, self, "choice_bias", (choices,), dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        weights, ids = self.choose(self.router(x))
        identity_weights: Tensor | None = None
        if self.first_identity is not None:
            identity = ids >= self.first_identity
            identity_weights = (weights * identity).sum(-1, keepdim=True)
            weights, ids = weights.masked_fill(identity, 0), ids.masked_fill(identity, 0)
        gate_up, down = self.gate_up, self.down
        mixed: Tensor = self.fused_experts(
            x,
            weights,
            ids,
            gate_up.method.experts(gate_up),
            down.method.experts(down),
            gate_up_bias=gate_up.bias,
            down_bias=down.bias if self.adds_bias else None,
            **self.gate,
        )
        mixed = self.summed(mixed)
        if identity_weights is not None:
            mixed = mixed + (identity_weights * x).to(mixed.dtype)
        return mixed if self.shared is None else self.ops.add(mixed, self.shared(x))

    def summed(self, mixed: Tensor) -> Tensor:
        """Sum the expert outputs over the ranks."""
        return mixed if self.down.reduce is None else self.down.reduce.all_reduce(mixed)
