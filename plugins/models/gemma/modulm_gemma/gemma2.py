"""Gemma 2 (arXiv 2408.00118): norms around branches, softcaps, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, Head
from modulm_gemma.gemma import GemmaBase, GemmaConfig, gemma_norm
from modulm_layers import Attention, size, standard_attention, standard_mlp, tiny_config

__all__ = ["Gemma2Config", "Gemma2ForCausalLM", "Gemma2Layer"]


@frozen(kw_only=True)
class Gemma2Config(GemmaConfig):
    """config.json of Gemma 2; without layer types even layers have the window.

    null disables a softcap; defaults are in keys.json.
    """

    sliding_window: int | None = size(4096)
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        return "full_attention" if index % 2 else "sliding_attention"


class Gemma2Layer(Module):
    """norm, attention, norm, add; norm, feed-forward, norm, add."""

    def __init__(self, c: Gemma2Config, b: Builder, index: int) -> None:
        super().__init__()
        self.attn_norm = gemma_norm(b, "input_layernorm", c)
        self.attn = self.make_attention(c, b, index)
        self.attn_post = gemma_norm(b, "post_attention_layernorm", c)
        self.mlp_norm = gemma_norm(b, "pre_feedforward_layernorm", c)
        self.mlp = standard_mlp(c, b, act=c.activation)
        self.mlp_post = gemma_norm(b, "post_feedforward_layernorm", c)

    def make_attention(self, c: Gemma2Config, b: Builder, index: int, **changes: Any) -> Attention:
        """Attention with a configurable scale and optional softcap."""
        return standard_attention(
            c,
            b,
            index,
            scale=c.query_pre_attn_scalar**-0.5,
            softcap=c.attn_logit_softcapping or 0.0,
            **changes,
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, residual = self.attn_norm.add(x, residual)
        x = self.attn_post(self.attn(x, batch))
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp_post(self.mlp(x)), residual


class Gemma2ForCausalLM(GemmaBase):
    """Gemma 2 with a language-model head."""

    api = 1
    config_type = Gemma2Config
    layer = Gemma2Layer

    def make_head(self, config: Any, b: Builder) -> Head:
        return b.head(
            "lm_head",
            config.hidden_size,
            config.vocab_size,
            tied=self.embed if config.tie_word_embeddings else None,
            cap=config.final_logit_softcapping or 0.0,
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "gemma2",
            "Gemma2ForCausalLM",
            head_dim=24,
            sliding_window=12,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=10.0,
        )
