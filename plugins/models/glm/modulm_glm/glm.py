"""GLM 4 (arXiv 2406.12793): Llama's block with interleaved rotary positions on half of each head.

The 0414 models (Glm4) also norm each branch before it is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    SandwichLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["Glm4ForCausalLM", "Glm4Layer", "GlmConfig", "GlmForCausalLM", "GlmLayer"]


@frozen(kw_only=True)
class GlmConfig(DecoderConfig):
    """config.json of GLM 4; gate and up are one tensor in the file."""

    ROPE_NEOX = False

    rms_norm_eps: float = 1.5625e-7
    head_dim: int | None = size(128)
    max_position_embeddings: int = size(131072)
    partial_rotary_factor: float = 0.5
    attention_bias: bool = True


class GlmLayer(PreNormLayer):
    """The pre-norm block with biased projections into attention."""

    def __init__(self, c: GlmConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, out_bias=False),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class Glm4Layer(SandwichLayer):
    """The block with a norm after each branch as well."""

    def __init__(self, c: GlmConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, out_bias=False),
            b.rms_norm("post_self_attn_layernorm", c.hidden_size, c.rms_norm_eps),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
            b.rms_norm("post_mlp_layernorm", c.hidden_size, c.rms_norm_eps),
        )


class GlmForCausalLM(DecoderForCausalLM):
    """GLM 4 with a language-model head."""

    api = 1
    config_type = GlmConfig
    layer = GlmLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("glm", "GlmForCausalLM", head_dim=24, partial_rotary_factor=0.5)


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM 4 of April 2025 with a language-model head."""

    layer = Glm4Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("glm4", "Glm4ForCausalLM", head_dim=24, partial_rotary_factor=0.5)
