"""StarCoder and SantaCoder (arXiv 2305.06161, 2301.03988): GPT-2's block with one key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import (
    AttentionNames,
    Builder,
    DecoderConfig,
    DecoderForCausalLM,
    Head,
    LearnedPositions,
    Norm,
    PlainMLP,
    PreNormLayer,
    Rewrite,
    WeightNames,
    size,
    split_heads,
    standard_attention,
)

__all__ = ["GPTBigCodeConfig", "GPTBigCodeForCausalLM", "GPTBigCodeLayer"]

_NAMES = AttentionNames(out="c_proj", qkv="c_attn")


@frozen(kw_only=True)
class GPTBigCodeConfig(DecoderConfig):
    """config.json of StarCoder, in its own spelling of the keys."""

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
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    multi_query: bool = True
    scale_attn_weights: bool = True
    add_cross_attention: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.add_cross_attention:
            raise ValueError("add_cross_attention: true: not yet")

    @property
    def kv_heads(self) -> int:
        return 1 if self.multi_query else self.num_attention_heads


class GPTBigCodeLayer(PreNormLayer):
    """The pre-norm block; every projection has a bias."""

    def __init__(self, c: GPTBigCodeConfig, b: Builder, index: int) -> None:
        attn = standard_attention(
            c,
            b,
            index,
            at="attn",
            rope=None,
            scale=None if c.scale_attn_weights else 1.0,
            bias=True,
            out_bias=True,
            names=_NAMES,
        )
        inner, act = c.inner_size, c.hidden_act
        super().__init__(
            b.layer_norm("ln_1", c.hidden_size, c.layer_norm_eps),
            attn,
            b.layer_norm("ln_2", c.hidden_size, c.layer_norm_eps),
            PlainMLP(b.at("mlp"), c.hidden_size, inner, act, up="c_fc", down="c_proj"),
        )


class GPTBigCodeForCausalLM(DecoderForCausalLM):
    """StarCoder with a language-model head; old files hold the masks as well."""

    api = 1
    config_type = GPTBigCodeConfig
    layer = GPTBigCodeLayer
    root = "transformer"

    @classmethod
    def weights(cls, config: GPTBigCodeConfig) -> WeightNames:
        split = Rewrite(r"c_attn", split_heads(config.heads, config.heads))
        return WeightNames(
            rename=((r"^transformer\.h\.", "transformer.layers."),),
            ignore=(r"\.attn\.bias$", r"^transformer\.bias$"),
            rewrite=() if config.multi_query else (split,),
        )

    def make_embedding(self, config: Any, b: Builder) -> LearnedPositions:
        tokens = b.embedding("wte", config.vocab_size, config.hidden_size)
        rows = config.max_position_embeddings
        return LearnedPositions(tokens, b.embedding("wpe", rows, config.hidden_size))

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("ln_f", config.hidden_size, config.layer_norm_eps)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed.tokens if config.tie_word_embeddings else None
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["GPTBigCodeForCausalLM"],
            "model_type": "gpt_bigcode",
            "vocab_size": 512,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
        }
