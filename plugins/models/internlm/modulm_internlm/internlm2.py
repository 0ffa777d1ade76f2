"""InternLM 2 and 2.5 (arXiv 2403.17297): Llama's block, stored under other names.

Queries, keys and values are one tensor, ordered by key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen
from torch.nn import Module

from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    TextVectors,
    split_heads,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = [
    "InternLM2Config",
    "InternLM2ForCausalLM",
    "InternLM2ForRewardModel",
    "InternLM2Layer",
    "InternLM2VEForCausalLM",
]


@frozen(kw_only=True)
class InternLM2Config(DecoderConfig):
    """config.json of InternLM 2; `bias` is that of attention."""

    bias: bool = False


class InternLM2Layer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: InternLM2Config, b: Builder, index: int) -> None:
        names = AttentionNames(out="wo", qkv="wqkv")
        super().__init__(
            b.rms_norm("attention_norm", c.hidden_size, c.rms_norm_eps),
            standard_attention(
                c, b, index, at="attention", bias=c.bias, out_bias=c.bias, names=names
            ),
            b.rms_norm("ffn_norm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b.at("feed_forward"), bias=False),
        )


class InternLM2ForCausalLM(DecoderForCausalLM):
    """InternLM 2 with a language-model head."""

    api = 1
    config_type = InternLM2Config
    layer = InternLM2Layer
    oracle = "modulm_internlm.oracle:AsLlama"

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return WeightNames(
            rename=(
                (r"^model\.tok_embeddings\.", "model.embed_tokens."),
                (r"^output\.", "lm_head."),
                (r"\.feed_forward\.w1\.", ".feed_forward.mlp.gate_proj."),
                (r"\.feed_forward\.w3\.", ".feed_forward.mlp.up_proj."),
                (r"\.feed_forward\.w2\.", ".feed_forward.mlp.down_proj."),
            ),
            rewrite=(Rewrite(r"\.wqkv\.", split_heads(config.heads, config.kv_heads)),),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("internlm2", "InternLM2ForCausalLM", bias=True, rms_norm_eps=1e-5)


class InternLM2ForRewardModel(TextVectors, InternLM2ForCausalLM):
    """InternLM 2 that rates each token: the layer `v_head` in place of the LM head."""

    tasks = ("reward", "token_classify")
    heads = ("v_head",)

    def make_head(self, config: Any, b: Builder) -> Module:
        head: Module = b.linear("v_head", config.hidden_size, 1, split=False)
        return head

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return evolve(super().weights(config), ignore=(r"^output\.", r"^lm_head\."))


class InternLM2VEForCausalLM(InternLM2ForCausalLM):
    """The text model of Mono-InternVL (arXiv 2410.08202).

    Each layer has a second feed-forward block for the tokens of images, which text does not use.
    """

    oracle = "modulm_internlm.oracle:WithVisualExperts"

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return evolve(super().weights(config), ignore=(r"\.feed_forward_ve\.",))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["InternLM2VEForCausalLM"], "bias": False}
        return {**super().tiny(), **names}
