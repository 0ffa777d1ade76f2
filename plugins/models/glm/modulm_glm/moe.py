"""GLM 4.5 and 4.6 (arXiv 2508.06471): many small experts plus shared ones, partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.contracts.model import MtpLayer
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    Attention,
    DecoderForCausalLM,
    PreNormLayer,
    RoutedConfig,
    next_token_layer,
    routed_experts,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
    without_drafts,
)

__all__ = ["Glm4MoeConfig", "Glm4MoeForCausalLM", "Glm4MoeLayer"]


@frozen(kw_only=True)
class Glm4MoeConfig(RoutedConfig):
    """config.json of GLM 4.5."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(131072)
    partial_rotary_factor: float = 0.5
    use_qk_norm: bool = False
    n_shared_experts: int | None = size(1)
    first_k_dense_replace: int = size(1, least=0)
    num_nextn_predict_layers: int = size(1, least=0)


def _attention(c: Glm4MoeConfig, b: Builder, index: int) -> Attention:
    at = b.at("self_attn")
    norms = None
    if c.use_qk_norm:
        names = ("q_norm", "k_norm")
        norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in names)
    return standard_attention(c, b, index, out_bias=False, qk_norm=norms)


class Glm4MoeLayer(PreNormLayer):
    """The pre-norm block; the first layers have no experts."""

    def __init__(self, c: Glm4MoeConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b),
        )


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """GLM 4.5 with a language-model head. Layers beyond the last draft tokens (`mtp`)."""

    api = 1
    config_type = Glm4MoeConfig
    layer = Glm4MoeLayer

    @classmethod
    def weights(cls, config: Glm4MoeConfig) -> WeightNames:
        return without_drafts(config)

    @classmethod
    def mtp(cls, config: Glm4MoeConfig) -> MtpLayer | None:
        return next_token_layer(config, cls.layer)

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
