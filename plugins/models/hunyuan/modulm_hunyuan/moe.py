"""Hunyuan V1 with experts (Tencent, 2025; A13B), plus a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen

from modulm.nn import Builder
from modulm_hunyuan.hunyuan import HunYuanConfig, hunyuan_attention, tiny_rope
from modulm_layers import (
    DecoderForCausalLM,
    ExpertNames,
    GatedMLP,
    MoE,
    PreNormLayer,
    Routing,
    size,
    tiny_config,
)

__all__ = ["HunYuanMoEConfig", "HunYuanMoELayer", "HunYuanMoEV1ForCausalLM"]

_NAMES = ExpertNames(router="gate.wg")


@frozen(kw_only=True)
class HunYuanMoEConfig(HunYuanConfig):
    """config.json of Hunyuan with experts; `moe_topk` is one value, or one per layer."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "moe_topk",
    }

    num_experts: int = size(1)
    moe_topk: Any = field(default=1)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        layers = self.num_hidden_layers
        if isinstance(self.moe_topk, list | tuple) and len(self.moe_topk) != layers:
            raise ValueError(f"moe_topk: {len(self.moe_topk)} entries for {layers} layers")
        for index in range(layers):
            top = self.top_k(index)
            if type(top) is not int or not 1 <= top <= self.num_experts:
                raise ValueError(f"moe_topk: {top!r} of {self.num_experts} experts")

    def top_k(self, index: int) -> int:
        """The number of experts per token in layer `index`."""
        setting: Any = self.moe_topk
        top: int = setting[index] if isinstance(setting, list | tuple) else setting
        return top


class HunYuanMoELayer(PreNormLayer):
    """The pre-norm block with experts."""

    def __init__(self, c: HunYuanMoEConfig, b: Builder, index: int) -> None:
        at = b.at("mlp")
        experts = MoE(
            at,
            hidden=c.hidden_size,
            inner=c.inner_size,
            experts=c.num_experts,
            routing=Routing(c.top_k(index)),
            act=c.hidden_act,
            wide_router=True,
            shared=GatedMLP(at.at("shared_mlp"), c.hidden_size, c.inner_size, c.hidden_act),
            names=_NAMES,
        )
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            hunyuan_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            experts,
        )


class HunYuanMoEV1ForCausalLM(DecoderForCausalLM):
    """Hunyuan with experts and a language-model head."""

    api = 1
    config_type = HunYuanMoEConfig
    layer = HunYuanMoELayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "hunyuan_v1_moe",
            "HunYuanMoEV1ForCausalLM",
            head_dim=24,
            intermediate_size=32,
            num_experts=6,
            moe_topk=[2, 3, 1],
            rope_parameters=tiny_rope(),
        )
