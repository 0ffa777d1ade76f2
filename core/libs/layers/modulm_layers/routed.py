"""Routed experts in groups, with shared experts (arXiv 2401.06066 and 2412.19437).

The config keys and checks that several families have in common, and the block itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from modulm.contracts.model import MtpLayer
from modulm.contracts.weight_names import WeightNames
from modulm_layers.config import DecoderConfig, size
from modulm_layers.mlp import GatedMLP
from modulm_layers.moe import ExpertNames, MoE, Routing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

    from modulm.nn.builder import Builder

__all__ = ["RoutedConfig", "next_token_layer", "routed_experts", "without_drafts"]

_NAMES = ExpertNames()


@frozen(kw_only=True)
class RoutedConfig(DecoderConfig):
    """A decoder whose layers after the first `first_k_dense_replace` have routed experts.

    `mlp_layer_types` ("sparse", "dense"), if present, decides per layer instead. Experts are scored
    by sigmoids. A learned bias (`CHOICE_BIAS`) balances the choice without changing the weights. A
    group's score is the sum of its two best experts.
    """

    CHOICE_BIAS: ClassVar[bool] = True

    n_routed_experts: int = size()
    n_shared_experts: int | None = size(None)
    num_experts_per_tok: int = size()
    moe_intermediate_size: int = size()
    first_k_dense_replace: int = size(0, least=0)
    n_group: int = size(1)
    topk_group: int = size(1)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = size(0, least=0)
    mlp_layer_types: tuple[str, ...] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        kinds, layers = self.mlp_layer_types, self.num_hidden_layers
        if kinds is not None and len(kinds) != layers:
            raise ValueError(f"mlp_layer_types: {len(kinds)} entries for {layers} layers")
        if any(self.sparse(index) for index in range(layers)):
            self.routing.check(self.n_routed_experts)

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[index] == "sparse"
        return index >= self.first_k_dense_replace

    @property
    def routing(self) -> Routing:
        """How tokens choose experts."""
        return Routing(
            self.num_experts_per_tok,
            scoring="sigmoid",
            renormalise=self.norm_topk_prob,
            groups=self.n_group,
            top_groups=self.topk_group,
            group_score="top2",
            scale=self.routed_scaling_factor,
        )


def routed_experts(
    c: RoutedConfig, b: Builder, *, names: ExpertNames = _NAMES, choice_bias: bool | None = None
) -> MoE:
    """Make the feed-forward block of a sparse layer; `b` points at it.

    choice_bias: whether a bias is added for the choice; None means as the family's others.
    """
    shared = None
    if c.n_shared_experts is not None:
        inner = c.n_shared_experts * c.moe_intermediate_size
        at = b.at("shared_experts")
        shared = GatedMLP(at, c.hidden_size, inner, c.hidden_act, bias=c.mlp_bias)
    return MoE(
        b,
        hidden=c.hidden_size,
        inner=c.moe_intermediate_size,
        experts=c.n_routed_experts,
        routing=c.routing,
        act=c.hidden_act,
        wide_router=True,
        choice_bias=c.CHOICE_BIAS if choice_bias is None else choice_bias,
        shared=shared,
        names=names,
    )


def without_drafts(c: RoutedConfig) -> WeightNames:
    """Return weight names that skip the multi-token-prediction layers after the last layer."""
    drafts = range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers)
    return WeightNames(ignore=tuple(rf"^model\.layers\.{i}\." for i in drafts))


def next_token_layer(
    c: RoutedConfig, layer: Callable[[Any, Builder, int], Module]
) -> MtpLayer | None:
    """Build the first multi-token-prediction layer, as in DeepSeek-V3; `layer` makes layers."""
    last = c.num_hidden_layers - 1
    if not c.num_nextn_predict_layers:
        return None
    at = f"model.layers.{last + 1}"
    return MtpLayer(
        layer=lambda b: layer(c, b, last),
        at=at,
        hidden=c.hidden_size,
        eps=c.rms_norm_eps,
        embedding_norm=f"{at}.enorm",
        hidden_norm=f"{at}.hnorm",
        project=f"{at}.eh_proj",
        norm=f"{at}.shared_head.norm",
    )
