"""Jais 13B and 30B (arXiv 2308.16149): GPT-2 with ALiBi, gated feed-forward and multipliers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, frozen

from modulm.nn import Builder, Embedding, Head, Rewrite
from modulm_gpt2.gpt2 import GPT2Config, GPT2LMHeadModel
from modulm_layers import (
    AttentionNames,
    GatedMLP,
    PreNormLayer,
    only,
    standard_attention,
    transpose,
)

__all__ = ["JAISConfig", "JAISLMHeadModel", "JAISLayer"]

_NAMES = AttentionNames(out="c_proj", qkv="c_attn")


@frozen(kw_only=True)
class JAISConfig(GPT2Config):
    """config.json of Jais: multipliers of maximal update parametrization, in both spellings."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **GPT2Config.ALIASES,
        "mup_embeddings_scale": "embeddings_scale",
        "mup_scale_qk_dot_by_d": "scale_qk_dot_by_d",
    }

    hidden_act: str = "swiglu"
    position_embedding_type: str = "alibi"
    embeddings_scale: float = 1.0
    scale_qk_dot_by_d: bool = False
    width_scale: float | None = None
    mup_width_scale: float = 1.0
    mup_output_alpha: float = 1.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            hidden_act=("swiglu",),
            position_embedding_type=("alibi",),
            scale_attn_weights=(True,),
            scale_attn_by_inverse_layer_idx=(False,),
        )

    def attention_scale(self, index: int) -> float:
        return math.pow(self.head_size, -1.0 if self.scale_qk_dot_by_d else -0.5)

    @property
    def logit_scale(self) -> float:
        """The factor of logits."""
        product = self.mup_output_alpha * self.mup_width_scale
        return product if self.width_scale is None else self.width_scale


class JAISLayer(PreNormLayer):
    """The pre-norm block with layer norms; every projection has a bias."""

    def __init__(self, c: JAISConfig, b: Builder, index: int) -> None:
        hidden, eps = c.hidden_size, c.layer_norm_eps
        super().__init__(
            b.layer_norm("ln_1", hidden, eps),
            standard_attention(
                c,
                b,
                index,
                at="attn",
                rope=None,
                alibi=1.0,
                bias=True,
                out_bias=True,
                scale=c.attention_scale(index),
                names=_NAMES,
            ),
            b.layer_norm("ln_2", hidden, eps),
            GatedMLP(
                b.at("mlp"), hidden, c.inner_size, bias=True, gate="c_fc2", up="c_fc", down="c_proj"
            ),
        )


class JAISLMHeadModel(GPT2LMHeadModel):
    """Jais with a language-model head."""

    config_type = JAISConfig
    layer = JAISLayer  # type: ignore[assignment]
    names = evolve(
        GPT2LMHeadModel.names,
        ignore=(*GPT2LMHeadModel.names.ignore, r"relative_pe\.slopes$"),
        rewrite=(Rewrite(r"\.(c_attn|c_proj|c_fc|c_fc2)\.weight$", transpose),),
    )
    oracle = "modulm_gpt2.oracle:Jais"

    def make_embedding(self, config: Any, b: Builder) -> Embedding:  # type: ignore[override]
        scale = config.embeddings_scale
        embedding = b.embedding("wte", config.vocab_size, config.hidden_size, scale=scale)
        embedding.scales_given = True
        return embedding

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        scale = config.logit_scale
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, scale=scale)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["JAISLMHeadModel"],
            "model_type": "jais",
            "vocab_size": 512,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 96,
            "n_positions": 256,
            "activation_function": "swiglu",
            "position_embedding_type": "alibi",
            "mup_embeddings_scale": 2.0,
            "mup_scale_qk_dot_by_d": True,
            "mup_width_scale": 0.5,
            "mup_output_alpha": 3.0,
            "tie_word_embeddings": False,
        }
