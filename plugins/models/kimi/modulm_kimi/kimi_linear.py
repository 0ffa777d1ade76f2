"""Kimi Linear (Moonshot AI, arXiv 2510.26692): delta rule with per-channel decay.

Some layers have latent attention without positions; most have experts plus a shared one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import Factory, frozen

from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    DecoderForCausalLM,
    ExpertNames,
    KimiDeltaRule,
    LatentAttention,
    PreNormLayer,
    Rope,
    RoutedConfig,
    flatten,
    routed_experts,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = ["KimiLinearConfig", "KimiLinearForCausalLM", "KimiLinearLayer"]

_KINDS = {"full_attention", "linear_attention"}
_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


@frozen(kw_only=True)
class KimiLinearConfig(RoutedConfig):
    """config.json of Kimi Linear. `linear_attn_config`, a table in its own files, lists the
    delta-rule layers, counted from 1.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
    }

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(1048576)
    kv_lora_rank: int = size(512)
    q_lora_rank: int | None = size(None)
    qk_nope_head_dim: int = size(128)
    qk_rope_head_dim: int = size(64)
    v_head_dim: int = size(128)
    n_routed_experts: int = size(256)
    n_shared_experts: int | None = size(1)
    num_experts_per_tok: int = size(8)
    moe_intermediate_size: int = size(1024)
    routed_scaling_factor: float = 2.446
    first_k_dense_replace: int = size(1, least=0)
    linear_attn_config: dict[str, Any] = Factory(dict)
    linear_head_dim: int = size(128)
    linear_num_heads: int = size(32)
    linear_conv_kernel_dim: int = size(4, least=2)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        unknown = {self.layer_type(i) for i in range(self.num_hidden_layers)} - _KINDS
        if unknown:
            raise ValueError(f"layer_types: kinds are {sorted(_KINDS)}, got {sorted(unknown)}")
        if any(type(n) is not int or n < 1 for n in self.delta):
            raise ValueError(f"linear_attn_config: {self.delta!r} must be counts")

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def delta(self) -> tuple[int, int, int]:
        """(heads, head size, convolution width) of a delta rule."""
        settings = self.linear_attn_config
        return (
            settings.get("num_heads", self.linear_num_heads),
            settings.get("head_dim", self.linear_head_dim),
            settings.get("short_conv_kernel_size", self.linear_conv_kernel_dim),
        )

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        listed = self.linear_attn_config.get("full_attn_layers")
        full = bool(index) and index % 4 == 0 if listed is None else index + 1 in listed
        return "full_attention" if full else "linear_attention"


def _attention(c: KimiLinearConfig, b: Builder) -> LatentAttention:
    """Latent attention without rotation: infinite factors disable every pair of dimensions."""
    still = (math.inf,) * (c.qk_rope_head_dim // 2)
    rope = Rope(c.qk_rope_head_dim, kind="longrope", short_factors=still, long_factors=still)
    return LatentAttention(
        b,
        hidden=c.hidden_size,
        heads=c.heads,
        rank=c.kv_lora_rank,
        nope=c.qk_nope_head_dim,
        value=c.v_head_dim,
        rope=rope,
        q_rank=c.q_lora_rank,
        bias=c.attention_bias,
    )


def _delta_rule(c: KimiLinearConfig, b: Builder) -> KimiDeltaRule:
    heads, dim, width = c.delta
    return KimiDeltaRule(
        b,
        hidden=c.hidden_size,
        heads=heads,
        head_dim=dim,
        width=width,
        eps=c.rms_norm_eps,
        act=c.hidden_act,
    )


class KimiLinearLayer(PreNormLayer):
    """Delta rule or latent attention, then experts; the first layers have none."""

    def __init__(self, c: KimiLinearConfig, b: Builder, index: int) -> None:
        at = b.at("self_attn")
        full = c.layer_type(index) == "full_attention"
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, at) if full else _delta_rule(c, at),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp"), names=_NAMES) if c.sparse(index) else standard_mlp(c, b),
        )


class KimiLinearForCausalLM(DecoderForCausalLM):
    """Kimi Linear with a language-model head."""

    api = 1
    config_type = KimiLinearConfig
    layer = KimiLinearLayer
    names = WeightNames(
        rename=((r"\.block_sparse_moe\.", ".mlp."),), rewrite=(Rewrite(r"\.A_log$", flatten),)
    )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        # For the norm of the delta rule's output, see Qwen3-Next.
        return tiny_config(
            "kimi_linear",
            "KimiLinearForCausalLM",
            rms_norm_eps=1e-3,
            num_key_value_heads=4,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=20,
            num_local_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_head_dim=16,
            linear_num_heads=4,
        )
