"""Phi 3 and 4 (arXiv 2404.14219, 2412.08905): Llama's block with fused weights and longrope."""

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

__all__ = ["Phi3Config", "Phi3ForCausalLM", "Phi3Layer"]


@frozen(kw_only=True)
class Phi3Config(DecoderConfig):
    """config.json of Phi 3 and 4; the trained length is a separate key next to the rotary ones."""

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(4096)
    original_max_position_embeddings: int | None = size(4096)


class Phi3Layer(PreNormLayer):
    """The pre-norm block; the file holds q, k, v and gate, up as one tensor each."""

    def __init__(self, c: Phi3Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi 3 and 4 (text) with a language-model head."""

    api = 1
    config_type = Phi3Config
    layer = Phi3Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "phi3",
            "Phi3ForCausalLM",
            original_max_position_embeddings=256,
            sliding_window=40,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [2.0 + 0.3 * i for i in range(6)],
            },
        )
