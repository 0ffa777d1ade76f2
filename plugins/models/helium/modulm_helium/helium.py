"""Helium (Kyutai, 2025): Llama's block with interleaved rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["HeliumConfig", "HeliumForCausalLM", "HeliumLayer"]


@frozen(kw_only=True)
class HeliumConfig(DecoderConfig):
    """config.json of Helium."""

    ROPE_NEOX = False

    head_dim: int | None = size(128)
    max_position_embeddings: int = size(4096)
    rms_norm_eps: float = 1e-8
    rope_theta: float = 100000.0


class HeliumLayer(PreNormLayer):
    """The pre-norm block; the output projection of attention has no bias."""

    def __init__(self, c: HeliumConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, out_bias=False),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class HeliumForCausalLM(DecoderForCausalLM):
    """Helium with a language-model head."""

    api = 1
    config_type = HeliumConfig
    layer = HeliumLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("helium", "HeliumForCausalLM", head_dim=16, attention_bias=True)
