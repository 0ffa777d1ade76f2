"""Mixtral (arXiv 2401.04088): Mistral's block with experts instead of the feed-forward block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    MoE,
    PreNormLayer,
    Routing,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["MixtralConfig", "MixtralForCausalLM", "MixtralLayer"]


@frozen(kw_only=True)
class MixtralConfig(DecoderConfig):
    """config.json of Mixtral."""

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(131072)
    num_local_experts: int = size(8)
    num_experts_per_tok: int = size(2)


class MixtralLayer(PreNormLayer):
    """The pre-norm block; a token's two experts are weighted by a softmax over their scores."""

    def __init__(self, c: MixtralConfig, b: Builder, index: int) -> None:
        experts = MoE(
            b.at("block_sparse_moe"),
            hidden=c.hidden_size,
            inner=c.intermediate_size,
            experts=c.num_local_experts,
            routing=Routing(c.num_experts_per_tok),
            act=c.hidden_act,
            names=ExpertNames(gate="w1", up="w3", down="w2"),
        )
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            experts,
        )


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral with a language-model head."""

    api = 1
    config_type = MixtralConfig
    layer = MixtralLayer
    #: Files contain the first name; the library's models, and adapters trained on them, the second.
    names = WeightNames(rename=((r"\.mlp\.", ".block_sparse_moe."),))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("mixtral", "MixtralForCausalLM", num_local_experts=4)
