"""Qwen 2 and 3 with experts: many small experts; Qwen 2 also has a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLP,
    MoE,
    PreNormLayer,
    Routing,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)
from modulm_qwen.qwen2 import QwenConfig
from modulm_qwen.qwen3 import qwen3_attention

__all__ = [
    "Qwen2MoeConfig",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeConfig",
    "Qwen3MoeForCausalLM",
    "SharedExperts",
]


@frozen(kw_only=True)
class QwenMoeConfig(QwenConfig):
    """Keys that select layers with experts: every `decoder_sparse_step`-th except
    `mlp_only_layers`.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    num_experts: int = size()
    num_experts_per_tok: int = size()
    moe_intermediate_size: int = size()
    norm_topk_prob: bool = False
    decoder_sparse_step: int = size(1)
    mlp_only_layers: tuple[int, ...] = ()

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0


@frozen(kw_only=True)
class Qwen2MoeConfig(QwenMoeConfig):
    """config.json of Qwen2-MoE."""

    shared_expert_intermediate_size: int = size()
    qkv_bias: bool = True

    def layer_type(self, index: int) -> str:
        """The layer's type; by default, every other one of the first `max_window_layers` has a
        window.
        """
        if self.layer_types is not None:
            return super().layer_type(index)
        return "full_attention" if index % 2 else "sliding_attention"

    def window(self, index: int) -> int | None:
        below = self.layer_types is not None or index < self.max_window_layers
        return DecoderConfig.window(self, index) if self.use_sliding_window and below else None


@frozen(kw_only=True)
class Qwen3MoeConfig(QwenMoeConfig):
    """config.json of Qwen3-MoE; a window applies to all layers."""

    def window(self, index: int) -> int | None:
        return (self.sliding_window or None) if self.use_sliding_window else None


def make_experts(c: QwenMoeConfig, b: Builder) -> MoE:
    """Make the routed experts; `b` points at their block."""
    routing = Routing(c.num_experts_per_tok, renormalise=c.norm_topk_prob)
    return MoE(
        b,
        hidden=c.hidden_size,
        inner=c.moe_intermediate_size,
        experts=c.num_experts,
        routing=routing,
        act=c.hidden_act,
    )


class SharedExperts(Module):
    """The routed experts and a shared one with a learned gate."""

    def __init__(self, c: Qwen2MoeConfig, b: Builder) -> None:
        super().__init__()
        at, self.ops = b.at("mlp"), b.ops
        inner = c.shared_expert_intermediate_size
        self.experts = make_experts(c, at)
        self.shared = GatedMLP(at.at("shared_expert"), c.hidden_size, inner, c.hidden_act)
        self.gate = at.linear("shared_expert_gate", c.hidden_size, 1, split=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        mixed: Tensor = self.ops.add(self.experts(x), self.shared(x), self.gate(x))
        return mixed


class Qwen2MoeLayer(PreNormLayer):
    """Qwen 2's block with experts in its sparse layers."""

    def __init__(self, c: Qwen2MoeConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, bias=c.qkv_bias, out_bias=False),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            SharedExperts(c, b) if c.sparse(index) else standard_mlp(c, b),
        )


class Qwen3MoeLayer(PreNormLayer):
    """Qwen 3's block with experts in its sparse layers."""

    def __init__(self, c: Qwen3MoeConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            qwen3_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            make_experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b),
        )


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen 1.5 and 2 with experts and a language-model head."""

    api = 1
    config_type = Qwen2MoeConfig
    layer = Qwen2MoeLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            mlp_only_layers=[1],
        )


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen 3 with experts and a language-model head."""

    api = 1
    config_type = Qwen3MoeConfig
    layer = Qwen3MoeLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            head_dim=24,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            decoder_sparse_step=2,
        )
