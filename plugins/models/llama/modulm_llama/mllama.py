"""Llama 3.2 Vision's text model (Meta, 2024): Llama with cross-attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, Embedding
from modulm_layers import (
    AttentionNames,
    CrossAttention,
    DecoderConfig,
    DecoderForCausalLM,
    only,
    size,
    standard_mlp,
    tiny_config,
)
from modulm_llama.llama import LlamaLayer

__all__ = ["MORE", "MllamaForCausalLM", "MllamaTextConfig"]

#: Rows of the embedding without a head row: the image token and reserved ones.
MORE = 8
_NAMES = AttentionNames()


@frozen(kw_only=True)
class MllamaTextConfig(DecoderConfig):
    """config.json of the text model. image_tokens: maximum encoder outputs per row, set by the
    surrounding model.
    """

    cross_attention_layers: tuple[int, ...] = field(default=(3, 8, 13, 18, 23, 28, 33, 38))
    image_tokens: int = size(1024)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, tie_word_embeddings=(False,))


class _CrossLayer(Module):
    """Gated cross-attention to images and a gated feed-forward block.

    Tokens before the first image pass through unchanged.
    """

    attn_gate: Tensor
    mlp_gate: Tensor

    def __init__(self, c: MllamaTextConfig, b: Builder) -> None:
        super().__init__()
        at = b.at("cross_attn")
        norms = [at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in ("q_norm", "k_norm")]
        self.attn_norm = b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.attn = CrossAttention(
            at, hidden=c.hidden_size, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_size,
            longest=c.image_tokens, qk_norm=(norms[0], norms[1]), bias=False,
            names=_NAMES,
        )  # fmt: skip
        self.mlp_norm = b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp = standard_mlp(c, b)
        for part in ("attn", "mlp"):
            b.parameter(f"cross_attn_{part}_gate", self, f"{part}_gate", (1,))

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, residual = self.attn_norm.add(x, residual)
        attended = self.attn(x, batch)
        # Tokens before the first image attend to nothing; no bias is added to their zeros.
        looking = (attended != 0).any(-1, keepdim=True)
        x, residual = self.mlp_norm.add(attended * self.attn_gate.tanh(), residual)
        return self.mlp(x) * (looking * self.mlp_gate.tanh()), residual


class MllamaForCausalLM(DecoderForCausalLM):
    """The text model. Without images, its cross-attention layers do nothing."""

    api = 1
    config_type = MllamaTextConfig

    def layer(self, c: MllamaTextConfig, b: Builder, index: int) -> Module:
        """A layer of the decoder."""
        crossed = index in c.cross_attention_layers
        return _CrossLayer(c, b) if crossed else LlamaLayer(c, b, index)

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("embed_tokens", config.vocab_size + MORE, config.hidden_size)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_config("mllama_text_model", "MllamaForCausalLM", num_hidden_layers=4),
            "pad_token_id": 0,
            "cross_attention_layers": [1, 3],
        }
