"""GPT-2 (Radford et al., 2019): learned positions, layer norms, weights as [inputs, outputs]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder, Head, Norm, Rewrite, WeightNames
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    LearnedPositions,
    PlainMLP,
    PreNormLayer,
    size,
    standard_attention,
    transpose,
)

__all__ = ["GPT2Block", "GPT2Config", "GPT2LMHeadModel", "GPT2Layer"]

_NAMES = AttentionNames(out="c_proj", qkv="c_attn")


@frozen(kw_only=True)
class GPT2Config(DecoderConfig):
    """config.json of GPT-2, with its own key names."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    intermediate_size: int | None = size(None)
    max_position_embeddings: int = size(1024)
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.add_cross_attention:
            raise ValueError("add_cross_attention: not supported yet: true")

    def attention_scale(self, index: int) -> float:
        """The factor of the scores of layer `index`."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (index + 1) if self.scale_attn_by_inverse_layer_idx else scale


class GPT2Block(PreNormLayer):
    """Pre-norm block with layer norms and a plain feed-forward; `b` points at the layer."""

    def __init__(self, c: DecoderConfig, b: Builder, attention: Attention, eps: float) -> None:
        super().__init__(
            b.layer_norm("ln_1", c.hidden_size, eps),
            attention,
            b.layer_norm("ln_2", c.hidden_size, eps),
            PlainMLP(
                b.at("mlp"), c.hidden_size, c.inner_size, c.hidden_act, up="c_fc", down="c_proj"
            ),
        )


class GPT2Layer(GPT2Block):
    """The block without rotation; every projection has a bias."""

    def __init__(self, c: GPT2Config, b: Builder, index: int) -> None:
        biased = {"bias": True, "out_bias": True, "scale": c.attention_scale(index)}
        attention = standard_attention(c, b, index, at="attn", rope=None, names=_NAMES, **biased)
        super().__init__(c, b, attention, c.layer_norm_eps)


class GPT2LMHeadModel(DecoderForCausalLM):
    """GPT-2 with a language-model head; early files leave out the leading "transformer."."""

    api = 1
    config_type = GPT2Config
    layer = GPT2Layer
    root = "transformer"
    names = WeightNames(
        rename=(
            (r"^(?=h\.|ln_f\.|wte\.|wpe\.)", "transformer."),
            (r"^transformer\.h\.", "transformer.layers."),
        ),
        ignore=(r"\.attn\.bias$",),
        rewrite=(Rewrite(r"\.(c_attn|c_proj|c_fc)\.weight$", transpose),),
    )

    def make_embedding(self, config: Any, b: Builder) -> LearnedPositions:
        tokens = b.embedding("wte", config.vocab_size, config.hidden_size)
        positions = b.embedding("wpe", config.max_position_embeddings, config.hidden_size)
        return LearnedPositions(tokens, positions)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("ln_f", config.hidden_size, config.layer_norm_eps)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed.tokens if config.tie_word_embeddings else None
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": 512,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "scale_attn_by_inverse_layer_idx": True,
        }
