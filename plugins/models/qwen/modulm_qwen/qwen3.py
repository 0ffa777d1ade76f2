"""Qwen 3 (arXiv 2505.09388): the standard block, with an RMS norm on each head's q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    Attention,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)
from modulm_qwen.qwen2 import QwenConfig

__all__ = ["Qwen3Config", "Qwen3ForCausalLM", "Qwen3Layer", "qwen3_attention"]


@frozen(kw_only=True)
class Qwen3Config(QwenConfig):
    """config.json of Qwen 3; the head size is a separate key."""

    BIDIRECTIONAL: ClassVar[bool] = True

    head_dim: int | None = size(128)


def qwen3_attention(c: QwenConfig, b: Builder, index: int) -> Attention:
    """Attention with a norm per head of queries and keys, before the rotation."""
    at = b.at("self_attn")
    norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in ("q_norm", "k_norm"))
    return standard_attention(c, b, index, qk_norm=norms)


class Qwen3Layer(PreNormLayer):
    """The pre-norm block with normed queries and keys."""

    def __init__(self, c: Qwen3Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            qwen3_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen 3 with a language-model head."""

    api = 1
    config_type = Qwen3Config
    layer = Qwen3Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("qwen3", "Qwen3ForCausalLM", head_dim=24, tie_word_embeddings=True)
