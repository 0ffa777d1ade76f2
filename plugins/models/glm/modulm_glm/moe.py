"""GLM 4.5 and 4.6 (arXiv 2508.06471): many small experts beside shared ones, partial rotation."""

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
    WeightNames,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["Glm4MoeConfig", "Glm4MoeForCausalLM", "Glm4MoeLayer"]


@frozen(kw_only=True)
class Glm4MoeConfig(DecoderConfig):
    """config.json of GLM 4.5. A group of experts is as good as its two best ones."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(131072)
    partial_rotary_factor: float = 0.5
    use_qk_norm: bool = False
    n_routed_experts: int = size()
    n_shared_experts: int = size(1)
    num_experts_per_tok: int = size()
    moe_intermediate_size: int = size()
    first_k_dense_replace: int = size(1, least=0)
    n_group: int = size(1)
    topk_group: int = size(1)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = size(1, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.routing.check(self.n_routed_experts)

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


def _attention(c: Glm4MoeConfig, b: Builder, index: int) -> Attention:
    at = b.at("self_attn")
    norms = None
    if c.use_qk_norm:
        names = ("q_norm", "k_norm")
        norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in names)
    return standard_attention(c, b, index, out_bias=False, qk_norm=norms)


def _experts(c: Glm4MoeConfig, b: Builder) -> MoE:
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


class Glm4MoeLayer(PreNormLayer):
    """The pre-norm block; the first layers have no experts."""

    def __init__(self, c: Glm4MoeConfig, b: Builder, index: int) -> None:
        dense = index < c.first_k_dense_replace
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b) if dense else _experts(c, b.at("mlp")),
        )


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """GLM 4.5 with a language-model head. Layers beyond the last, which draft, are not read."""

    api = 1
    config_type = Glm4MoeConfig
    layer = Glm4MoeLayer

    @classmethod
    def weights(cls, config: Glm4MoeConfig) -> WeightNames:
        first = config.num_hidden_layers
        drafts = range(first, first + config.num_nextn_predict_layers)
        return WeightNames(ignore=tuple(rf"^model\.layers\.{i}\." for i in drafts))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            head_dim=24,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
        )
