"""Phi 1, 1.5 and 2 (arXiv 2309.05463): attention and feed-forward in parallel on one norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder, Head, Norm
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    ParallelLayer,
    PlainMLP,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["PhiConfig", "PhiForCausalLM", "PhiLayer"]


@frozen(kw_only=True)
class PhiConfig(DecoderConfig):
    """config.json of Phi."""

    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = size(2048)
    partial_rotary_factor: float = 0.5
    qk_layernorm: bool = False


class PhiLayer(ParallelLayer):
    """Parallel branches on one norm; every projection has a bias."""

    def __init__(self, c: PhiConfig, b: Builder, index: int) -> None:
        mlp = PlainMLP(
            b.at("mlp"), c.hidden_size, c.intermediate_size, c.hidden_act, up="fc1", down="fc2"
        )
        norm = b.layer_norm("input_layernorm", c.hidden_size, c.layer_norm_eps)
        super().__init__(norm, _attention(c, b, index), mlp)


def _attention(c: PhiConfig, b: Builder, index: int) -> Attention:
    at = b.at("self_attn")
    norms = None
    if c.qk_layernorm:
        names = ("q_layernorm", "k_layernorm")
        norms = tuple(at.layer_norm(name, c.head_size, c.layer_norm_eps) for name in names)
    names = AttentionNames(out="dense")
    return standard_attention(c, b, index, bias=True, out_bias=True, qk_norm=norms, names=names)


class PhiForCausalLM(DecoderForCausalLM):
    """Phi 1, 1.5 and 2 with a language-model head that has a bias."""

    api = 1
    config_type = PhiConfig
    layer = PhiLayer

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("final_layernorm", config.hidden_size, config.layer_norm_eps)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, bias=True)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("phi", "PhiForCausalLM", num_key_value_heads=4, qk_layernorm=True)
