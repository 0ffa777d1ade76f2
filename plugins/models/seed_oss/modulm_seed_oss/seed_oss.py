"""Seed-OSS (ByteDance, 2025): Llama's block with biased query, key and value projections."""

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

__all__ = ["SeedOssConfig", "SeedOssForCausalLM", "SeedOssLayer"]


@frozen(kw_only=True)
class SeedOssConfig(DecoderConfig):
    """config.json of Seed-OSS."""

    head_dim: int | None = size(None)
    max_position_embeddings: int = size(524288)
    attention_bias: bool = True
    attention_out_bias: bool = False


class SeedOssLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: SeedOssConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, out_bias=c.attention_out_bias),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS with a language-model head."""

    api = 1
    config_type = SeedOssConfig
    layer = SeedOssLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("seed_oss", "SeedOssForCausalLM", head_dim=24)
