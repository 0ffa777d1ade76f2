"""AFM (Arcee AI, 2025): Llama's block with a plain feed-forward block of squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PlainMLP,
    PreNormLayer,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["ArceeConfig", "ArceeForCausalLM", "ArceeLayer"]


@frozen(kw_only=True)
class ArceeConfig(DecoderConfig):
    """config.json of AFM."""

    hidden_act: str = "relu2"
    max_position_embeddings: int = size(4096)
    rms_norm_eps: float = 1e-5


class ArceeLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: ArceeConfig, b: Builder, index: int) -> None:
        inner, act = c.inner_size, c.hidden_act
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            PlainMLP(b.at("mlp"), c.hidden_size, inner, act, bias=c.mlp_bias),
        )


class ArceeForCausalLM(DecoderForCausalLM):
    """AFM with a language-model head."""

    api = 1
    config_type = ArceeConfig
    layer = ArceeLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        scaling = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return tiny_config("arcee", "ArceeForCausalLM", rope_parameters=scaling)
