"""LFM2 with experts (Liquid AI, 2025; 8B-A1B): sigmoid routing, except in the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import ExpertNames, MoE, Routing, size, tiny_config
from modulm_lfm2.lfm2 import Lfm2BaseConfig, Lfm2ForCausalLM, Lfm2Layer

__all__ = ["Lfm2MoeConfig", "Lfm2MoeForCausalLM", "Lfm2MoeLayer"]

_NAMES = ExpertNames(gate="w1", up="w3", down="w2", choice_bias="expert_bias")


@frozen(kw_only=True)
class Lfm2MoeConfig(Lfm2BaseConfig):
    """config.json of LFM2 with experts."""

    moe_intermediate_size: int = size()
    num_dense_layers: int = size(2, least=0)
    num_experts: int = size(32)
    num_experts_per_tok: int = size(4)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    use_expert_bias: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} of {self.num_experts}"
            )


def _experts(c: Lfm2MoeConfig, b: Builder) -> MoE:
    routing = Routing(
        c.num_experts_per_tok,
        scoring="sigmoid",
        renormalise=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
    )
    return MoE(
        b.at("feed_forward"),
        hidden=c.hidden_size,
        inner=c.moe_intermediate_size,
        experts=c.num_experts,
        routing=routing,
        choice_bias=c.use_expert_bias,
        names=_NAMES,
    )


class Lfm2MoeLayer(Lfm2Layer):
    """LFM2's block; the first layers have no experts."""

    def __init__(self, c: Lfm2MoeConfig, b: Builder, index: int) -> None:
        super().__init__(c, b, index, None if index < c.num_dense_layers else _experts(c, b))


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts and a language-model head."""

    config_type = Lfm2MoeConfig
    layer = Lfm2MoeLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "lfm2_moe",
            "Lfm2MoeForCausalLM",
            layer_types=["conv", "conv", "full_attention"],
            moe_intermediate_size=32,
            num_dense_layers=1,
            num_experts=6,
            num_experts_per_tok=2,
        )
