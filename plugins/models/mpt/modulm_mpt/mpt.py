"""MPT (MosaicML, 2023): ALiBi positions, and no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen

from modulm.nn import Builder, Embedding, Norm, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    PlainMLP,
    PreNormLayer,
    size,
    standard_attention,
)

__all__ = ["MptConfig", "MptForCausalLM", "MptLayer"]

#: Values of the released models; others are not supported.
_FIXED = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "prefix_lm": False,
    "qk_ln": False,
}


@frozen(kw_only=True)
class MptConfig(DecoderConfig):
    """config.json of MPT; `attn_config` holds the attention settings."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    intermediate_size: int | None = size(None)
    expansion_ratio: int = size(4)
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    no_bias: bool = True
    attn_config: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        for key, value in _FIXED.items():
            setting = self.attn_config.get(key, value)
            if setting != value:
                raise ValueError(f"attn_config.{key}: not supported yet: {setting!r}")
        if not self.no_bias:
            raise ValueError("no_bias: not supported yet: false")
        for key in ("clip_qkv", "softmax_scale"):
            number = self.attn_config.get(key)
            if number is not None and type(number) not in (int, float):
                raise ValueError(f"attn_config.{key}: {number!r} is not a number")

    @property
    def inner_size(self) -> int:
        return self.expansion_ratio * self.hidden_size


class MptLayer(PreNormLayer):
    """The pre-norm block with a plain feed-forward part."""

    def __init__(self, c: MptConfig, b: Builder, index: int) -> None:
        attn = standard_attention(
            c,
            b,
            index,
            at="attn",
            rope=None,
            alibi=1.0,
            clip=c.attn_config.get("clip_qkv"),
            scale=c.attn_config.get("softmax_scale"),
            names=AttentionNames(out="out_proj", qkv="Wqkv"),
        )
        super().__init__(
            b.layer_norm("norm_1", c.hidden_size, c.layer_norm_eps, bias=False),
            attn,
            b.layer_norm("norm_2", c.hidden_size, c.layer_norm_eps, bias=False),
            PlainMLP(b.at("ffn"), c.hidden_size, c.inner_size, "gelu", bias=False),
        )


class MptForCausalLM(DecoderForCausalLM):
    """MPT with a language-model head."""

    api = 1
    config_type = MptConfig
    layer = MptLayer
    root = "transformer"
    names = WeightNames(rename=((r"^transformer\.blocks\.", "transformer.layers."),))

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("wte", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("norm_f", config.hidden_size, config.layer_norm_eps, bias=False)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["MptForCausalLM"],
            "model_type": "mpt",
            "vocab_size": 512,
            "d_model": 48,
            "n_layers": 3,
            "n_heads": 6,
            "max_seq_len": 256,
            "attn_config": {"clip_qkv": 1.5},
        }
