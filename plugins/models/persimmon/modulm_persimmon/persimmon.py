"""Persimmon (Adept, 2023): squared ReLU, normed queries and keys, half of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder, Norm, Rewrite, WeightNames
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    PlainMLP,
    PreNormLayer,
    size,
    split_heads,
    standard_attention,
    tiny_config,
)

__all__ = ["PersimmonConfig", "PersimmonForCausalLM", "PersimmonLayer"]

_NAMES = AttentionNames(out="dense", qkv="query_key_value")


@frozen(kw_only=True)
class PersimmonConfig(DecoderConfig):
    """config.json of Persimmon."""

    hidden_act: str = "relu2"
    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = size(16384)
    partial_rotary_factor: float = 0.5
    qk_layernorm: bool = True


def _attention(c: PersimmonConfig, b: Builder, index: int) -> Attention:
    at = b.at("self_attn")
    norms = None
    if c.qk_layernorm:
        names = ("q_layernorm", "k_layernorm")
        norms = tuple(at.layer_norm(name, c.head_size, c.layer_norm_eps) for name in names)
    return standard_attention(c, b, index, bias=True, out_bias=True, qk_norm=norms, names=_NAMES)


class PersimmonLayer(PreNormLayer):
    """The pre-norm block with a plain feed-forward part."""

    def __init__(self, c: PersimmonConfig, b: Builder, index: int) -> None:
        mlp = PlainMLP(
            b.at("mlp"),
            c.hidden_size,
            c.inner_size,
            c.hidden_act,
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        )
        super().__init__(
            b.layer_norm("input_layernorm", c.hidden_size, c.layer_norm_eps),
            _attention(c, b, index),
            b.layer_norm("post_attention_layernorm", c.hidden_size, c.layer_norm_eps),
            mlp,
        )


class PersimmonForCausalLM(DecoderForCausalLM):
    """Persimmon with a language-model head."""

    api = 1
    config_type = PersimmonConfig
    layer = PersimmonLayer

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        split = split_heads(config.heads, config.heads)
        return WeightNames(rewrite=(Rewrite(r"query_key_value", split),))

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("final_layernorm", config.hidden_size, config.layer_norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**tiny_config("persimmon", "PersimmonForCausalLM"), "num_key_value_heads": 4}
