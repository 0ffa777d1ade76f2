"""GPT-J (Wang and Komatsuzaki, 2021): parallel branches, interleaved rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder, Embedding, Head, Norm, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    ParallelLayer,
    PlainMLP,
    Rope,
    size,
    standard_attention,
)

__all__ = ["GPTJConfig", "GPTJForCausalLM", "GPTJLayer", "tiny_gptj"]


@frozen(kw_only=True)
class GPTJConfig(DecoderConfig):
    """config.json of GPT-J, with its own key names; `rotary_dim` dimensions of each head are
    rotated.
    """

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
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    rotary_dim: int = size(64, least=2)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.rotary_dim > self.head_size or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim: {self.rotary_dim} is odd or more than a head's {self.head_size}"
            )

    def rope(self, layer_type: str = "") -> Rope:
        return Rope(size=self.rotary_dim, neox=False)


class GPTJLayer(ParallelLayer):
    """Parallel branches on one norm; only the feed-forward block has biases."""

    def __init__(self, c: GPTJConfig, b: Builder, index: int) -> None:
        names = AttentionNames(out="out_proj")
        inner, act = c.inner_size, c.hidden_act
        super().__init__(
            b.layer_norm("ln_1", c.hidden_size, c.layer_norm_eps),
            standard_attention(c, b, index, at="attn", names=names),
            PlainMLP(b.at("mlp"), c.hidden_size, inner, act, up="fc_in", down="fc_out"),
        )


class GPTJForCausalLM(DecoderForCausalLM):
    """GPT-J with a language-model head that has a bias; old files hold the masks as well."""

    api = 1
    config_type: ClassVar[type] = GPTJConfig
    layer = GPTJLayer
    root = "transformer"
    names = WeightNames(
        rename=((r"^transformer\.h\.", "transformer.layers."),),
        ignore=(r"\.attn\.(bias|causal_mask)$",),
    )

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("wte", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("ln_f", config.hidden_size, config.layer_norm_eps)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, bias=True)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_gptj("gptj", "GPTJForCausalLM")


def tiny_gptj(model_type: str, architecture: str) -> Mapping[str, Any]:
    """config.json of a tiny checkpoint with half of each head rotated."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 512,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 96,
        "n_positions": 256,
        "rotary_dim": 8,
    }
