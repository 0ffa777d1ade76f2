"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): parallel branches, each with its own norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch.nn import Module

from modulm.nn import Builder, Embedding, Head, Norm, Rewrite, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    ParallelLayer,
    PlainMLP,
    PreNormLayer,
    only,
    split_heads,
    standard_attention,
    tiny_config,
)

__all__ = ["GPTNeoXConfig", "GPTNeoXForCausalLM", "neox_layer"]

_NAMES = AttentionNames(out="dense", qkv="query_key_value")


@frozen(kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """config.json of GPT-NeoX."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "rotary_pct": "partial_rotary_factor",
        "rotary_emb_base": "rope_theta",
    }

    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.25
    attention_bias: bool = True
    use_parallel_residual: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, head_dim=(None, self.hidden_size // self.num_attention_heads))


def neox_layer(c: GPTNeoXConfig, b: Builder, index: int) -> Module:
    """Parallel or sequential branches."""
    attn_norm = b.layer_norm("input_layernorm", c.hidden_size, c.layer_norm_eps)
    attn = standard_attention(c, b, index, at="attention", names=_NAMES)
    mlp_norm = b.layer_norm("post_attention_layernorm", c.hidden_size, c.layer_norm_eps)
    mlp = PlainMLP(
        b.at("mlp"),
        c.hidden_size,
        c.inner_size,
        c.hidden_act,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    )
    if c.use_parallel_residual:
        return ParallelLayer(attn_norm, attn, mlp, mlp_norm)
    return PreNormLayer(attn_norm, attn, mlp_norm, mlp)


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """GPT-NeoX with a language-model head."""

    api = 1
    config_type = GPTNeoXConfig
    layer = staticmethod(neox_layer)
    root = "gpt_neox"

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return WeightNames(
            ignore=(r"\.attention\.bias$",),
            rewrite=(Rewrite(r"query_key_value", split_heads(config.heads, config.kv_heads)),),
        )

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("embed_in", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("final_layer_norm", config.hidden_size, config.layer_norm_eps)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        return b.head("embed_out", config.hidden_size, config.vocab_size, tied=tied)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        shape = tiny_config("gpt_neox", "GPTNeoXForCausalLM")
        return {**shape, "num_key_value_heads": 4, "rotary_pct": 0.5}
