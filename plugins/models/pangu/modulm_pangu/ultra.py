"""openPangu Ultra MoE (Huawei, arXiv 2505.04519): DeepSeek-V3 with norms after the branches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.model import Batch, MtpLayer
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    DecoderForCausalLM,
    LatentAttention,
    PreNormLayer,
    Rope,
    RoutedConfig,
    next_token_layer,
    only,
    routed_experts,
    size,
    standard_mlp,
    tiny_config,
    without_drafts,
)

__all__ = ["PanguUltraMoEConfig", "PanguUltraMoEForCausalLM", "PanguUltraMoELayer"]


@frozen(kw_only=True)
class PanguUltraMoEConfig(RoutedConfig):
    """config.json of openPangu Ultra MoE, in its own spelling and in DeepSeek's."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "attention_kv_lora_dim": "kv_lora_rank",
        "attention_q_lora_dim": "q_lora_rank",
        "attention_qk_dim": "qk_nope_head_dim",
        "attention_qk_rope_dim": "qk_rope_head_dim",
        "attention_v_dim": "v_head_dim",
        "num_routed_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_dense_layers": "first_k_dense_replace",
        "num_mtp_layers": "num_nextn_predict_layers",
    }

    rms_norm_eps: float = 1e-5
    kv_lora_rank: int = size()
    q_lora_rank: int | None = size(None)
    qk_nope_head_dim: int = size()
    qk_rope_head_dim: int = size()
    v_head_dim: int = size()
    sandwich_norm: bool = False
    router_enable_expert_bias: bool = False
    param_sink_number: int = size(0, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, rope_scaling=(None,), param_sink_number=(0,))

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim

    def rope(self, layer_type: str = "") -> Rope:
        return evolve(super().rope(layer_type), neox=False)


class PanguUltraMoELayer(PreNormLayer):
    """norm, attention, norm, add; norm, feed-forward, norm, add.

    Without `sandwich_norm` it is the pre-norm block.
    """

    def __init__(self, c: PanguUltraMoEConfig, b: Builder, index: int) -> None:
        hidden, eps = c.hidden_size, c.rms_norm_eps
        both = c.sandwich_norm
        mlp_norm = "pre_mlp_layernorm" if both else "post_attention_layernorm"
        attention = LatentAttention(
            b.at("self_attn"),
            hidden=hidden,
            heads=c.heads,
            rank=c.kv_lora_rank,
            nope=c.qk_nope_head_dim,
            value=c.v_head_dim,
            rope=c.rope(),
            q_rank=c.q_lora_rank,
            eps=eps,
        )
        biased = c.router_enable_expert_bias
        sparse = c.sparse(index)
        super().__init__(
            b.rms_norm("input_layernorm", hidden, eps),
            attention,
            b.rms_norm(mlp_norm, hidden, eps),
            routed_experts(c, b.at("mlp"), choice_bias=biased) if sparse else standard_mlp(c, b),
        )
        self.attn_post = b.rms_norm("post_attention_layernorm", hidden, eps) if both else None
        self.mlp_post = b.rms_norm("post_mlp_layernorm", hidden, eps) if both else None

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        if self.attn_post is None or self.mlp_post is None:
            return super().forward(x, residual, batch)
        x, residual = self.attn_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attn_post(self.attn(x, batch)), residual)
        return self.mlp_post(self.mlp(x)), residual


class PanguUltraMoEForCausalLM(DecoderForCausalLM):
    """openPangu Ultra MoE with a language-model head."""

    api = 1
    config_type = PanguUltraMoEConfig
    layer = PanguUltraMoELayer
    oracle = "modulm_pangu.oracle:AsDeepseekV3"

    @classmethod
    def weights(cls, config: PanguUltraMoEConfig) -> WeightNames:
        return without_drafts(config)

    @classmethod
    def mtp(cls, config: PanguUltraMoEConfig) -> MtpLayer | None:
        return next_token_layer(config, cls.layer)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "pangu_ultra_moe",
            "PanguUltraMoEForCausalLM",
            num_key_value_heads=4,
            attention_kv_lora_dim=32,
            attention_q_lora_dim=40,
            attention_qk_dim=24,
            attention_qk_rope_dim=16,
            attention_v_dim=20,
            num_routed_experts=8,
            num_shared_experts=1,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            num_dense_layers=1,
            routed_scaling_factor=2.5,
            sandwich_norm=True,
            rms_norm_eps=1e-6,
        )
