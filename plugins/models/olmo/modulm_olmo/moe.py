"""OLMoE and FlexOlmo (arXiv 2409.02060, 2507.07024): OLMo's blocks with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    MoE,
    PreNormLayer,
    Routing,
    size,
    tiny_config,
)
from modulm_olmo.olmo2 import Olmo2Layer, normed_attention

__all__ = [
    "FlexOlmoConfig",
    "FlexOlmoForCausalLM",
    "FlexOlmoLayer",
    "OlmoeConfig",
    "OlmoeForCausalLM",
    "OlmoeLayer",
]


@frozen(kw_only=True)
class OlmoeConfig(DecoderConfig):
    """config.json of OLMoE."""

    ALIASES: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(4096)
    num_experts: int = size(64)
    num_experts_per_tok: int = size(8)
    norm_topk_prob: bool = False
    clip_qkv: float | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} of {self.num_experts}"
            )


@frozen(kw_only=True)
class FlexOlmoConfig(OlmoeConfig):
    """config.json of FlexOlmo."""

    rms_norm_eps: float = 1e-6
    rope_theta: float = 500000.0
    num_experts: int = size(7)
    num_experts_per_tok: int = size(5)


def _experts(c: OlmoeConfig, b: Builder) -> MoE:
    return MoE(
        b.at("mlp"),
        hidden=c.hidden_size,
        inner=c.inner_size,
        experts=c.num_experts,
        routing=Routing(c.num_experts_per_tok, renormalise=c.norm_topk_prob),
        act=c.hidden_act,
    )


class OlmoeLayer(PreNormLayer):
    """The pre-norm block; queries and keys are normed over all heads."""

    def __init__(self, c: OlmoeConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            normed_attention(c, b, index, clip=c.clip_qkv),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            _experts(c, b),
        )


class FlexOlmoLayer(Olmo2Layer):
    """OLMo 2's block."""

    def __init__(self, c: FlexOlmoConfig, b: Builder, index: int) -> None:
        super().__init__(c, b, index, _experts(c, b))


class OlmoeForCausalLM(DecoderForCausalLM):
    """OLMoE with a language-model head."""

    api = 1
    config_type: ClassVar[type] = OlmoeConfig
    layer: ClassVar[Any] = OlmoeLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "olmoe",
            "OlmoeForCausalLM",
            intermediate_size=32,
            num_experts=6,
            num_experts_per_tok=3,
        )


class FlexOlmoForCausalLM(OlmoeForCausalLM):
    """FlexOlmo with a language-model head."""

    config_type = FlexOlmoConfig
    layer = FlexOlmoLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "flex_olmo",
            "FlexOlmoForCausalLM",
            intermediate_size=32,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        )
