"""dots.llm1 (rednote, arXiv 2506.05767): many small experts beside shared ones, normed q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import (
    Attention,
    Builder,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLP,
    MoE,
    PreNormLayer,
    Routing,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["Dots1Config", "Dots1ForCausalLM", "Dots1Layer"]


@frozen(kw_only=True)
class Dots1Config(DecoderConfig):
    """config.json of dots.llm1. A group of experts is as good as its two best ones."""

    ALIASES: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}

    n_routed_experts: int = size()
    n_shared_experts: int = size()
    num_experts_per_tok: int = size()
    moe_intermediate_size: int = size()
    first_k_dense_replace: int = size(0, least=0)
    n_group: int = size(1)
    topk_group: int = size(1)
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    max_window_layers: int = size(62, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.routing.check(self.n_routed_experts)

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        return "sliding_attention" if index >= self.max_window_layers else "full_attention"

    @property
    def routing(self) -> Routing:
        """How a token chooses its experts."""
        return Routing(
            self.num_experts_per_tok,
            scoring="sigmoid",
            renormalise=self.norm_topk_prob,
            groups=self.n_group,
            top_groups=self.topk_group,
            group_score="top2",
            scale=self.routed_scaling_factor,
        )


def _attention(c: Dots1Config, b: Builder, index: int) -> Attention:
    at = b.at("self_attn")
    norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in ("q_norm", "k_norm"))
    return standard_attention(c, b, index, qk_norm=norms)


def _experts(c: Dots1Config, b: Builder) -> MoE:
    inner = c.n_shared_experts * c.moe_intermediate_size
    return MoE(
        b,
        hidden=c.hidden_size,
        inner=c.moe_intermediate_size,
        experts=c.n_routed_experts,
        routing=c.routing,
        act=c.hidden_act,
        wide_router=True,
        choice_bias=True,
        shared=GatedMLP(b.at("shared_experts"), c.hidden_size, inner, c.hidden_act),
    )


class Dots1Layer(PreNormLayer):
    """The pre-norm block; the first layers have no experts."""

    def __init__(self, c: Dots1Config, b: Builder, index: int) -> None:
        dense = index < c.first_k_dense_replace
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b) if dense else _experts(c, b.at("mlp")),
        )


class Dots1ForCausalLM(DecoderForCausalLM):
    """dots.llm1 with a language-model head."""

    api = 1
    config_type = Dots1Config
    layer = Dots1Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "dots1",
            "Dots1ForCausalLM",
            sliding_window=12,
            max_window_layers=2,
            n_routed_experts=6,
            n_shared_experts=2,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
