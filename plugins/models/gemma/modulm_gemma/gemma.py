"""Gemma (arXiv 2403.08295): scaled embeddings, norm weights stored minus one, a tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder, Embedding, Norm
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["GemmaBase", "GemmaConfig", "GemmaForCausalLM", "GemmaLayer", "gemma_norm"]


@frozen(kw_only=True)
class GemmaConfig(DecoderConfig):
    """config.json of Gemma; `hidden_activation` is the newer spelling of `hidden_act`."""

    hidden_act: str = "gelu_pytorch_tanh"
    head_dim: int | None = size(256)
    max_position_embeddings: int = size(8192)
    tie_word_embeddings: bool = True
    hidden_activation: str | None = None
    use_bidirectional_attention: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.use_bidirectional_attention and not self.BIDIRECTIONAL:
            raise ValueError("use_bidirectional_attention: not supported yet for all tokens")

    @property
    def activation(self) -> str:
        """The activation; "gelu" in early files means its tanh approximation."""
        fallback = "gelu_pytorch_tanh" if self.hidden_act == "gelu" else self.hidden_act
        return self.hidden_activation or fallback


def gemma_norm(b: Builder, name: str, c: DecoderConfig, width: int | None = None) -> Norm:
    """An RMS norm whose weight is stored minus one, over the hidden size or `width`."""
    return b.rms_norm(name, width or c.hidden_size, c.rms_norm_eps, offset=1.0)


class GemmaLayer(PreNormLayer):
    """The pre-norm block with Gemma's norms."""

    def __init__(self, c: GemmaConfig, b: Builder, index: int) -> None:
        super().__init__(
            gemma_norm(b, "input_layernorm", c),
            standard_attention(c, b, index),
            gemma_norm(b, "post_attention_layernorm", c),
            standard_mlp(c, b, act=c.activation),
        )


class GemmaBase(DecoderForCausalLM):
    """The base class of all Gemma models."""

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        hidden = config.hidden_size
        return b.embedding("embed_tokens", config.vocab_size, hidden, scale=hidden**0.5)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return gemma_norm(b, "norm", config)


class GemmaForCausalLM(GemmaBase):
    """Gemma with a language-model head."""

    api = 1
    config_type = GemmaConfig
    layer = GemmaLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("gemma", "GemmaForCausalLM", head_dim=24)
