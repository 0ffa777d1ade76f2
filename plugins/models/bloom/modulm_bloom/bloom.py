"""BLOOM (arXiv 2211.05100): ALiBi positions, and a norm on the embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, Head, Norm, Rewrite, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    PlainMLP,
    size,
    split_heads,
    standard_attention,
)

__all__ = ["BloomConfig", "BloomForCausalLM", "BloomLayer"]

_NAMES = AttentionNames(out="dense", qkv="query_key_value")


@frozen(kw_only=True)
class BloomConfig(DecoderConfig):
    """config.json of BLOOM, with its own key names."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    intermediate_size: int | None = size(None)
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    apply_residual_connection_post_layernorm: bool = False


class BloomLayer(Module):
    """The pre-norm block; a setting adds branches to the normed stream instead."""

    def __init__(self, c: BloomConfig, b: Builder, index: int) -> None:
        super().__init__()
        self.normed_stream = c.apply_residual_connection_post_layernorm
        self.attn_norm = b.layer_norm("input_layernorm", c.hidden_size, c.layer_norm_eps)
        self.attn = standard_attention(
            c,
            b,
            index,
            at="self_attention",
            rope=None,
            alibi=1.0,
            bias=True,
            out_bias=True,
            names=_NAMES,
        )
        self.mlp_norm = b.layer_norm("post_attention_layernorm", c.hidden_size, c.layer_norm_eps)
        self.mlp = PlainMLP(
            b.at("mlp"),
            c.hidden_size,
            c.inner_size,
            c.hidden_act,
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, stream = self.attn_norm.add(x, residual)
        x, stream = self.mlp_norm.add(self.attn(x, batch), x if self.normed_stream else stream)
        return self.mlp(x), x if self.normed_stream else stream


class BloomEmbedding(Module):
    """Token embeddings with a norm."""

    def __init__(self, c: BloomConfig, b: Builder) -> None:
        super().__init__()
        self.tokens = b.embedding("word_embeddings", c.vocab_size, c.hidden_size)
        self.norm = b.layer_norm("word_embeddings_layernorm", c.hidden_size, c.layer_norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden] for the batch's tokens."""
        x: Tensor = self.norm(self.tokens(batch))
        return x


class BloomForCausalLM(DecoderForCausalLM):
    """BLOOM with a language-model head; early files leave out the leading "transformer."."""

    api = 1
    config_type = BloomConfig
    layer = BloomLayer
    root = "transformer"

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return WeightNames(
            rename=(
                (r"^(?=h\.|ln_f\.|word_embeddings)", "transformer."),
                (r"^transformer\.h\.", "transformer.layers."),
            ),
            rewrite=(Rewrite(r"query_key_value", split_heads(config.heads, config.kv_heads)),),
        )

    def make_embedding(self, config: Any, b: Builder) -> BloomEmbedding:
        return BloomEmbedding(config, b)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("ln_f", config.hidden_size, config.layer_norm_eps)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed.tokens if config.tie_word_embeddings else None
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["BloomForCausalLM"],
            "model_type": "bloom",
            "vocab_size": 512,
            "hidden_size": 48,
            "n_layer": 3,
            "n_head": 6,
            "seq_length": 256,
        }
