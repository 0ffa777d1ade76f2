"""Llama 2 to 3.x (arXiv 2307.09288, 2407.21783).

The reference decoder; other families are described by how they differ from it. All rotary scalings
of its checkpoints are read from config.json by the shared configuration (`modulm_layers.rope`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["LlamaConfig", "LlamaForCausalLM", "LlamaLayer"]


@frozen(kw_only=True)
class LlamaConfig(DecoderConfig):
    """config.json of Llama: the common keys."""

    BIDIRECTIONAL: ClassVar[bool] = True


class LlamaLayer(PreNormLayer):
    """The pre-norm block with rotary attention and a gated feed-forward part."""

    def __init__(self, c: DecoderConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama with a language-model head."""

    api = 1
    config_type = LlamaConfig
    layer = LlamaLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return tiny_config("llama", "LlamaForCausalLM", rope_parameters=scaling)
