"""EXAONE 3 and 3.5 (arXiv 2408.03541): Llama's block, stored under GPT-2's names."""

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
    standard_attention,
    tiny_config,
)

__all__ = ["ExaoneConfig", "ExaoneForCausalLM", "ExaoneLayer"]


@frozen(kw_only=True)
class ExaoneConfig(DecoderConfig):
    """config.json of EXAONE 3."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_layers": "num_hidden_layers",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    }

    rms_norm_eps: float = 1e-5


class ExaoneLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: ExaoneConfig, b: Builder, index: int) -> None:
        mlp = b.at("mlp")
        super().__init__(
            b.rms_norm("ln_1", c.hidden_size, c.rms_norm_eps),
            standard_attention(
                c, b, index, at="attn.attention", names=AttentionNames(out="out_proj")
            ),
            b.rms_norm("ln_2", c.hidden_size, c.rms_norm_eps),
            GatedMLP(
                mlp, c.hidden_size, c.inner_size, c.hidden_act,
                gate="c_fc_0", up="c_fc_1", down="c_proj",
            ),
        )  # fmt: skip


class ExaoneForCausalLM(DecoderForCausalLM):
    """EXAONE 3 with a language-model head."""

    api = 1
    config_type = ExaoneConfig
    layer = ExaoneLayer
    root = "transformer"
    names = WeightNames(rename=((r"^transformer\.h\.", "transformer.layers."),))
    oracle = "modulm_exaone.oracle:AsLlama"

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("wte", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("ln_f", config.hidden_size, config.rms_norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_config("exaone", "ExaoneForCausalLM", head_dim=24, layer_norm_epsilon=1e-4),
            "num_layers": 3,
            "activation_function": "silu",
        }
