"""Granite 3 with experts (IBM, 2024): Granite's block; some models have a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from attrs import frozen

from modulm.nn import Builder, WeightNames
from modulm_granite.granite import GraniteConfig, GraniteForCausalLM, ScaledLayer
from modulm_layers import ExpertNames, GatedMLP, MoE, Routing, size, standard_attention, tiny_config

__all__ = [
    "EXPERT_NAMES",
    "GraniteMoeConfig",
    "GraniteMoeForCausalLM",
    "GraniteMoeLayer",
    "GraniteMoeSharedForCausalLM",
    "granite_experts",
    "granite_shared",
]

_EXPERTS = ExpertNames(
    router="router.layer", gate_up_stack="input_linear", down_stack="output_linear"
)
#: Expert stacks are stored like the weights of linear layers.
EXPERT_NAMES = WeightNames(rename=((r"(block_sparse_moe\.(?:in|out)put_linear)\.weight$", r"\1"),))


class _Sizes(Protocol):
    """Keys of all Granite models with experts."""

    hidden_size: int
    hidden_act: str
    inner_size: int
    num_local_experts: int
    num_experts_per_tok: int
    shared_intermediate_size: int


@frozen(kw_only=True)
class GraniteMoeConfig(GraniteConfig):
    """config.json of Granite with experts; a size above 0 enables the shared one."""

    num_local_experts: int = size(8)
    num_experts_per_tok: int = size(2)
    shared_intermediate_size: int = size(0, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} of {self.num_local_experts}"
            )


def granite_experts(c: _Sizes, b: Builder) -> MoE:
    """Build the routed experts plus the shared one; `b` points at the layer."""
    return MoE(
        b.at("block_sparse_moe"),
        hidden=c.hidden_size,
        inner=c.inner_size,
        experts=c.num_local_experts,
        routing=Routing(c.num_experts_per_tok),
        act=c.hidden_act,
        shared=granite_shared(c, b) if c.shared_intermediate_size else None,
        names=_EXPERTS,
    )


def granite_shared(c: _Sizes, b: Builder) -> GatedMLP:
    """Build the shared expert."""
    return GatedMLP(
        b.at("shared_mlp"),
        c.hidden_size,
        c.shared_intermediate_size,
        c.hidden_act,
        fused="input_linear",
        down="output_linear",
    )


class GraniteMoeLayer(ScaledLayer):
    """Attention, then experts."""

    def __init__(self, c: GraniteMoeConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, scale=c.attention_multiplier),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            granite_experts(c, b),
            c.residual_multiplier,
        )


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite with experts and a language-model head."""

    config_type: ClassVar[type] = GraniteMoeConfig
    layer: ClassVar[Any] = GraniteMoeLayer
    names = EXPERT_NAMES

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny("granitemoe", "GraniteMoeForCausalLM")


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """Granite with experts, a shared one and a language-model head."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        shared = {"shared_intermediate_size": 48}
        return _tiny("granitemoeshared", "GraniteMoeSharedForCausalLM", **shared)


def _tiny(model_type: str, architecture: str, **changes: Any) -> Mapping[str, Any]:
    return tiny_config(
        model_type,
        architecture,
        intermediate_size=32,
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=1.5,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=1.3,
        **changes,
    )
