"""DeepSeekMoE (arXiv 2401.06066): many small experts plus shared ones, with plain attention.

Also the text model of DeepSeek-OCR 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen, validators

from modulm.nn import Builder
from modulm_deepseek.deepseek_v2 import softmax_routing
from modulm_layers import (
    DecoderForCausalLM,
    PreNormLayer,
    RoutedConfig,
    Routing,
    routed_experts,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["DeepseekMoEConfig", "DeepseekMoEForCausalLM"]


@frozen(kw_only=True)
class DeepseekMoEConfig(RoutedConfig):
    """config.json of DeepSeekMoE."""

    CHOICE_BIAS: ClassVar[bool] = False

    norm_topk_prob: bool = False
    moe_layer_freq: int = size(1)
    topk_method: str = field(
        default="greedy", validator=validators.in_(("greedy", "group_limited_greedy"))
    )
    scoring_func: str = field(default="softmax", validator=validators.in_(("softmax",)))

    def sparse(self, index: int) -> bool:
        return super().sparse(index) and index % self.moe_layer_freq == 0

    @property
    def routing(self) -> Routing:
        return softmax_routing(self, self.topk_method)


class _Layer(PreNormLayer):
    """The pre-norm block, with experts in the sparse layers."""

    def __init__(self, c: DeepseekMoEConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b),
        )


class DeepseekMoEForCausalLM(DecoderForCausalLM):
    """DeepSeekMoE with a language-model head."""

    api = 1
    config_type = DeepseekMoEConfig
    layer = _Layer
    oracle = "modulm_deepseek.oracle:AsOcr2Text"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "deepseek",
            "DeepseekForCausalLM",
            num_key_value_heads=4,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
