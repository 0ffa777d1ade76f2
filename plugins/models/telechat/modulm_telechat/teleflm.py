"""Tele-FLM (arXiv 2404.16645): Llama with the multipliers of maximal update parametrization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder, Embedding, Head
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["TeleFLMConfig", "TeleFLMForCausalLM", "TeleFLMLayer"]


@frozen(kw_only=True)
class TeleFLMConfig(DecoderConfig):
    """config.json of Tele-FLM; the multipliers count with `use_mup`."""

    use_mup: bool = False
    input_mult: float = 1.0
    output_mult: float = 1.0
    mup_scale_factor: float = 1.0


class TeleFLMLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: TeleFLMConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class TeleFLMForCausalLM(DecoderForCausalLM):
    """Tele-FLM with a language-model head."""

    api = 1
    config_type = TeleFLMConfig
    layer = TeleFLMLayer
    oracle = "modulm_telechat.oracle:AsGranite"

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        scale = config.input_mult if config.use_mup else 1.0
        embedding = b.embedding("embed_tokens", config.vocab_size, config.hidden_size, scale=scale)
        embedding.scales_given = True
        return embedding

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        scale = config.output_mult / config.mup_scale_factor if config.use_mup else 1.0
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, scale=scale)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "teleflm",
            "TeleFLMForCausalLM",
            use_mup=True,
            input_mult=2.0,
            output_mult=3.0,
            mup_scale_factor=2.0,
        )
