"""Qwen 1 (arXiv 2309.16609): Qwen 2's block, stored under GPT-2's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder, Embedding, Norm, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLP,
    PreNormLayer,
    only,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["QWenConfig", "QWenLMHeadModel", "QWenLayer"]


@frozen(kw_only=True)
class QWenConfig(DecoderConfig):
    """config.json of Qwen 1; `intermediate_size` counts gate and up together.

    The maximum length is `seq_length`; beyond it the original code also scales the rotary base and
    the queries.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "kv_channels": "head_dim",
        "layer_norm_epsilon": "rms_norm_eps",
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "partial_rotary_factor",
    }

    seq_length: int = size(2048)
    no_bias: bool = True
    scale_attn_weights: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, no_bias=(True,), scale_attn_weights=(True,))
        if self.inner_size % 2:
            raise ValueError(f"intermediate_size: {self.inner_size} is odd")

    @property
    def max_length(self) -> int:
        return self.seq_length


class QWenLayer(PreNormLayer):
    """The pre-norm block with biased projections into attention."""

    def __init__(self, c: QWenConfig, b: Builder, index: int) -> None:
        names = AttentionNames(out="c_proj", qkv="c_attn")
        mlp = GatedMLP(
            b.at("mlp"), c.hidden_size, c.inner_size // 2, gate="w2", up="w1", down="c_proj"
        )
        super().__init__(
            b.rms_norm("ln_1", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, at="attn", bias=True, out_bias=False, names=names),
            b.rms_norm("ln_2", c.hidden_size, c.rms_norm_eps),
            mlp,
        )


class QWenLMHeadModel(DecoderForCausalLM):
    """Qwen 1 with a language-model head."""

    api = 1
    config_type = QWenConfig
    layer = QWenLayer
    root = "transformer"
    names = WeightNames(rename=((r"^transformer\.h\.", "transformer.layers."),))
    oracle = "modulm_qwen.oracle:QWenAsQwen2"

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("wte", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("ln_f", config.hidden_size, config.rms_norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_config("qwen", "QWenLMHeadModel", num_key_value_heads=4),
            "intermediate_size": 192,
            "kv_channels": 16,
            "seq_length": 256,
            "rotary_emb_base": 10000,
            "layer_norm_epsilon": 1e-6,
        }
