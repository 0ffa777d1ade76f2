"""Granite 3 (IBM, 2024): Llama's block with four multipliers (Yang et al., arXiv 2203.03466)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, Embedding, Head, Norm
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["GraniteConfig", "GraniteForCausalLM", "GraniteLayer", "ScaledLayer"]


@frozen(kw_only=True)
class GraniteConfig(DecoderConfig):
    """config.json of Granite, with multipliers of embeddings, branches, scores and logits (a
    divisor).
    """

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0


class ScaledLayer(PreNormLayer):
    """The pre-norm block; each branch is multiplied before it is added."""

    def __init__(
        self, attn_norm: Norm, attn: Module, mlp_norm: Norm, mlp: Module, multiplier: float
    ) -> None:
        super().__init__(attn_norm, attn, mlp_norm, mlp)
        self.ops, self.multiplier = attn_norm.ops, multiplier

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, residual = self.attn_norm.add(x, residual)
        attended = self.ops.scale(self.attn(x, batch), self.multiplier)
        x, residual = self.mlp_norm.add(attended, residual)
        return self.ops.scale(self.mlp(x), self.multiplier), residual


class GraniteLayer(ScaledLayer):
    """Attention and a gated feed-forward block."""

    def __init__(self, c: GraniteConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, scale=c.attention_multiplier),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
            c.residual_multiplier,
        )


class GraniteForCausalLM(DecoderForCausalLM):
    """Granite with a language-model head."""

    api = 1
    config_type = GraniteConfig
    layer = GraniteLayer

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        scale = config.embedding_multiplier
        embedding = b.embedding("embed_tokens", config.vocab_size, config.hidden_size, scale=scale)
        embedding.scales_given = True
        return embedding

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        scale = 1.0 / config.logits_scaling
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, scale=scale)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "granite",
            "GraniteForCausalLM",
            embedding_multiplier=1.5,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
            logits_scaling=1.3,
        )
