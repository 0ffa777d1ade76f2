"""DeepSeek-V2 (arXiv 2405.04434): latent attention, many small experts plus shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, field, frozen, validators
from torch.nn import Module

from modulm.contracts.model import MtpLayer
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    DecoderForCausalLM,
    LatentAttention,
    PreNormLayer,
    Rope,
    RoutedConfig,
    Routing,
    WholeRowLatentAttention,
    next_token_layer,
    routed_experts,
    size,
    standard_mlp,
    tiny_config,
    without_drafts,
)

__all__ = [
    "DeepseekConfig",
    "DeepseekForCausalLM",
    "DeepseekLayer",
    "DeepseekV2Config",
    "DeepseekV2ForCausalLM",
    "latent_settings",
    "softmax_routing",
    "tiny_deepseek",
]


@frozen(kw_only=True)
class DeepseekConfig(RoutedConfig):
    """Keys of both versions. Heads rotate only `qk_rope_head_dim` dimensions."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    kv_lora_rank: int = size()
    q_lora_rank: int | None = size(None)
    qk_nope_head_dim: int = size()
    qk_rope_head_dim: int = size()
    v_head_dim: int = size()
    rope_interleave: bool = True
    moe_layer_freq: int = size(1)

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim

    def rope(self, layer_type: str = "") -> Rope:
        return evolve(super().rope(layer_type), neox=not self.rope_interleave)

    def sparse(self, index: int) -> bool:
        return super().sparse(index) and index % self.moe_layer_freq == 0


@frozen(kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    """config.json of DeepSeek-V2. A group of experts is scored by its best one."""

    CHOICE_BIAS: ClassVar[bool] = False

    norm_topk_prob: bool = False
    topk_method: str = field(
        default="greedy", validator=validators.in_(("greedy", "group_limited_greedy"))
    )
    scoring_func: str = field(default="softmax", validator=validators.in_(("softmax",)))

    @property
    def routing(self) -> Routing:
        """Softmax routing."""
        return softmax_routing(self, self.topk_method)


def softmax_routing(c: RoutedConfig, method: str) -> Routing:
    """Softmax routing. As in the original code, weights are normalized or scaled, never both.

    method: `topk_method`.
    """
    grouped = method != "greedy"
    return Routing(
        c.num_experts_per_tok,
        renormalise=c.norm_topk_prob,
        groups=c.n_group if grouped else 1,
        top_groups=c.topk_group if grouped else 1,
        scale=1.0 if c.norm_topk_prob else c.routed_scaling_factor,
    )


def latent_settings(c: DeepseekConfig) -> Mapping[str, Any]:
    """Arguments of `LatentAttention` from the keys of all versions."""
    return {
        "hidden": c.hidden_size,
        "heads": c.heads,
        "rank": c.kv_lora_rank,
        "nope": c.qk_nope_head_dim,
        "value": c.v_head_dim,
        "rope": c.rope(),
        "q_rank": c.q_lora_rank,
        "bias": c.attention_bias,
    }


class DeepseekLayer(PreNormLayer):
    """The pre-norm block with latent attention, and experts in the sparse layers."""

    def __init__(
        self, c: DeepseekConfig, b: Builder, index: int, attention: Module | None = None
    ) -> None:
        latent = LatentAttention if c.is_causal else WholeRowLatentAttention
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            attention or latent(b.at("self_attn"), **latent_settings(c)),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b),
        )


class DeepseekForCausalLM(DecoderForCausalLM):
    """The base class of both versions. Layers beyond the last draft tokens (`mtp`)."""

    layer = DeepseekLayer

    @classmethod
    def weights(cls, config: DeepseekConfig) -> WeightNames:
        return without_drafts(config)

    @classmethod
    def mtp(cls, config: DeepseekConfig) -> MtpLayer | None:
        return next_token_layer(config, cls.layer)


class DeepseekV2ForCausalLM(DeepseekForCausalLM):
    """DeepSeek-V2 with a language-model head."""

    api = 1
    config_type = DeepseekV2Config

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_deepseek(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            topk_method="group_limited_greedy",
            q_lora_rank=40,
            routed_scaling_factor=1.5,
        )


def tiny_deepseek(model_type: str, architecture: str, **changes: Any) -> Mapping[str, Any]:
    """config.json of a tiny checkpoint: one dense layer, two with eight experts in four groups."""
    settings: dict[str, Any] = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    }
    return tiny_config(model_type, architecture, **{**settings, **changes})
