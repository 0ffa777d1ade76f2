"""Orion 14B (OrionStar, arXiv 2401.12246): Llama's block with layer norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder, Norm
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["OrionConfig", "OrionForCausalLM", "OrionLayer"]


@frozen(kw_only=True)
class OrionConfig(DecoderConfig):
    """config.json of Orion; `rms_norm_eps` is the epsilon of its layer norms."""

    rms_norm_eps: float = 1e-5


class OrionLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: OrionConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.layer_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.layer_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class OrionForCausalLM(DecoderForCausalLM):
    """Orion with a language-model head."""

    api = 1
    config_type = OrionConfig
    layer = OrionLayer
    oracle = "modulm_orion.oracle:AsStableLm"

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("norm", config.hidden_size, config.rms_norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("orion", "OrionForCausalLM", rms_norm_eps=1e-4)
