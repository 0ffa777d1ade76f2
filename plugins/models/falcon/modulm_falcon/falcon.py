"""Falcon (arXiv 2311.16867): one key head or grouped ones, and parallel branches.

7B has one key head and one norm for both branches; 40B and 180B ("new_decoder_architecture") have
groups and a norm per branch; RW models have sequential branches and ALiBi.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch.nn import Module

from modulm.nn import Builder, Embedding, Norm, Rewrite, WeightNames
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    ParallelLayer,
    PlainMLP,
    PreNormLayer,
    size,
    split_heads,
    standard_attention,
    tiny_config,
)

__all__ = ["FalconConfig", "FalconForCausalLM", "falcon_layer"]

_NAMES = AttentionNames(out="dense", qkv="query_key_value")


@frozen(kw_only=True)
class FalconConfig(DecoderConfig):
    """config.json of Falcon."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    intermediate_size: int | None = size(None)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    num_kv_heads: int | None = size(None)
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    num_ln_in_parallel_attn: int | None = size(None)
    alibi: bool = False
    bias: bool = False
    model_type: str = "falcon"

    @property
    def grouped(self) -> bool:
        """Whether key heads are grouped; Falcon 40B's first files show it by their model type."""
        return self.new_decoder_architecture or self.model_type == "RefinedWeb"

    @property
    def kv_heads(self) -> int:
        if self.multi_query and not self.grouped:
            return 1
        return self.num_kv_heads or self.num_attention_heads

    @property
    def two_norms(self) -> bool:
        """Whether parallel branches have a norm each."""
        count = self.num_ln_in_parallel_attn
        return count == 2 or (count is None and self.grouped)


def _attention(c: FalconConfig, b: Builder, index: int) -> Attention:
    """With ALiBi, biases are scaled like the scores."""
    return standard_attention(
        c,
        b,
        index,
        at="self_attention",
        rope=None if c.alibi else c.rope(),
        alibi=c.head_size**-0.5 if c.alibi else 0.0,
        bias=c.bias,
        out_bias=c.bias,
        names=_NAMES,
    )


def falcon_layer(c: FalconConfig, b: Builder, index: int) -> Module:
    """Parallel branches with one norm or two, or sequential branches."""

    def norm(name: str) -> Norm:
        return b.layer_norm(name, c.hidden_size, c.layer_norm_eps)

    attn = _attention(c, b, index)
    mlp = PlainMLP(
        b.at("mlp"),
        c.hidden_size,
        c.inner_size,
        c.hidden_act,
        bias=c.bias,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    )
    if not c.parallel_attn:
        return PreNormLayer(norm("input_layernorm"), attn, norm("post_attention_layernorm"), mlp)
    if c.two_norms:
        return ParallelLayer(norm("ln_attn"), attn, mlp, norm("ln_mlp"))
    return ParallelLayer(norm("input_layernorm"), attn, mlp)


class FalconForCausalLM(DecoderForCausalLM):
    """Falcon with a language-model head."""

    api = 1
    config_type = FalconConfig
    layer = staticmethod(falcon_layer)
    root = "transformer"

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return WeightNames(
            rename=((r"^transformer\.h\.", "transformer.layers."),),
            rewrite=(Rewrite(r"query_key_value", split_heads(config.heads, config.kv_heads)),),
        )

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("word_embeddings", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("ln_f", config.hidden_size, config.layer_norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "falcon",
            "FalconForCausalLM",
            new_decoder_architecture=True,
            num_kv_heads=2,
            ffn_hidden_size=96,
        )
