"""Qwen 3.5 for text (Qwen team, 2026): Qwen3-Next's mixers with separately named projections.

There are dense models and models with experts plus a shared one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch.nn import Module

from modulm.contracts.model import MtpLayer
from modulm.nn import Builder, Norm, WeightNames
from modulm_layers import DecoderForCausalLM, PreNormLayer, size, standard_mlp
from modulm_qwen.moe import Qwen2MoeConfig, SharedExperts
from modulm_qwen.qwen3_next import (
    DeltaKeys,
    GatedDeltaNet,
    delta_mtp,
    gated_attention,
    offset_norm,
    split_gate,
    tiny_delta,
)

__all__ = [
    "Qwen35Config",
    "Qwen35ForCausalLM",
    "Qwen35MoeConfig",
    "Qwen35MoeForCausalLM",
]


@frozen(kw_only=True)
class Qwen35Config(DeltaKeys):
    """config.json of Qwen 3.5's dense text models."""


@frozen(kw_only=True)
class Qwen35MoeConfig(DeltaKeys, Qwen2MoeConfig):
    """config.json of Qwen 3.5's text models with experts; every layer has them."""

    intermediate_size: int | None = size(None)
    moe_intermediate_size: int = size(512)
    shared_expert_intermediate_size: int = size(512)
    num_experts: int = size(256)
    num_experts_per_tok: int = size(8)
    norm_topk_prob: bool = True


class _Layer(PreNormLayer):
    def __init__(self, c: DeltaKeys, b: Builder, index: int, mlp: Module) -> None:
        super().__init__(
            offset_norm(c, b, "input_layernorm"),
            GatedDeltaNet(c, b.at("linear_attn"))
            if c.recurrent(index)
            else gated_attention(c, b, index),
            offset_norm(c, b, "post_attention_layernorm"),
            mlp,
        )


class Qwen35Layer(_Layer):
    """Delta rule or gated attention, then a feed-forward part."""

    def __init__(self, c: Qwen35Config, b: Builder, index: int) -> None:
        super().__init__(c, b, index, standard_mlp(c, b))


class Qwen35MoeLayer(_Layer):
    """Delta rule or gated attention, then experts plus a shared one."""

    def __init__(self, c: Qwen35MoeConfig, b: Builder, index: int) -> None:
        super().__init__(c, b, index, SharedExperts(c, b))


class Qwen35ForCausalLM(DecoderForCausalLM):
    """Qwen 3.5 (text) with a language-model head."""

    api = 1
    config_type: ClassVar[type] = Qwen35Config
    layer: ClassVar[Any] = Qwen35Layer

    @classmethod
    def weights(cls, config: DeltaKeys) -> WeightNames:
        return WeightNames(
            rename=((r"^model\.language_model\.", "model."),),
            ignore=(r"^mtp\.", r"^model\.visual\."),
            rewrite=(split_gate(config.heads),),
        )

    @classmethod
    def mtp(cls, config: DeltaKeys) -> MtpLayer | None:
        return delta_mtp(config, cls.layer)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return offset_norm(config, b, "norm")

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_delta("qwen3_5_text", "Qwen3_5ForCausalLM")


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    """Qwen 3.5 (text) with experts and a language-model head."""

    config_type = Qwen35MoeConfig
    layer = Qwen35MoeLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_delta(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        )
