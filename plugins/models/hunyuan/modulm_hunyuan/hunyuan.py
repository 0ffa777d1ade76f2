"""Hunyuan V1, dense (Tencent, 2025): Llama's block; queries and keys are normed after rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    Rope,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = [
    "HunYuanConfig",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanLayer",
    "hunyuan_attention",
    "tiny_rope",
]


@frozen(kw_only=True)
class HunYuanConfig(DecoderConfig):
    """config.json of Hunyuan. A rotary scaling with `alpha` raises the base for all lengths."""

    rms_norm_eps: float = 1e-5

    def rope(self, layer_type: str = "") -> Rope:
        table = self.rope_parameters or self.rope_scaling or {}
        alpha = table.get("alpha")
        if not alpha:
            return super().rope(layer_type)
        theta = table.get("rope_theta", self.rope_theta)
        for key, value in (("alpha", alpha), ("rope_theta", theta)):
            if type(value) not in (int, float) or value <= 0:
                raise ValueError(f"{key}: a positive number is needed, got {value!r}")
        size = self.head_size
        return Rope(size=size, theta=theta * alpha ** (size / (size - 2)))


def hunyuan_attention(c: HunYuanConfig, b: Builder, index: int) -> Attention:
    """The attention layer of both kinds."""
    at = b.at("self_attn")
    names = ("query_layernorm", "key_layernorm")
    norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in names)
    return standard_attention(c, b, index, qk_norm=norms, norm_last=True)


class HunYuanLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: HunYuanConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            hunyuan_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """Hunyuan with a language-model head."""

    api = 1
    config_type = HunYuanConfig
    layer = HunYuanLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "hunyuan_v1_dense",
            "HunYuanDenseV1ForCausalLM",
            head_dim=24,
            rope_parameters=tiny_rope(),
        )


def tiny_rope() -> Mapping[str, Any]:
    """The scaling that the released models have."""
    return {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 20.0, "factor": 1.0}
