"""Ling 3.0 (inclusionAI, 2026): Kimi's delta rule with bounded decays, latent attention with a gate
per head, and experts in groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.model import MtpLayer
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    DecoderForCausalLM,
    KimiDeltaRule,
    LatentAttention,
    PreNormLayer,
    RoutedConfig,
    flatten,
    next_token_layer,
    only,
    routed_experts,
    size,
    standard_mlp,
    tiny_config,
    without_drafts,
)

__all__ = ["BailingHybridConfig", "BailingHybridForCausalLM", "BailingHybridLayer"]

_FULL, _LINEAR = "full_attention", "linear_attention"


@frozen(kw_only=True)
class BailingHybridConfig(RoutedConfig):
    """config.json of Ling 3.0. The last layer of each `layer_group_size` has latent attention, the
    others the delta rule, whose heads have `head_dim` dimensions.
    """

    ROPE_NEOX = False
    ALIASES: ClassVar[Mapping[str, str]] = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
        "num_shared_experts": "n_shared_experts",
    }

    head_dim: int | None = size(128)
    kv_lora_rank: int = size(512)
    q_lora_rank: int | None = size(None)
    qk_nope_head_dim: int = size(128)
    qk_rope_head_dim: int = size(64)
    v_head_dim: int = size(128)
    rope_theta: float = 6e6
    short_conv_kernel_size: int = size(4, least=2)
    layer_group_size: int = size(6)
    kda_safe_gate: bool = True
    kda_lower_bound: float = -5.0
    no_kda_lora: bool = True
    use_bias: bool = False
    moe_shared_expert_intermediate_size: int | None = size(None)
    expert_swiglu_limit_list: tuple[float, ...] | None = None
    share_expert_swiglu_limit_list: tuple[float, ...] | None = None

    def __attrs_post_init__(self) -> None:
        if self.layer_types is None:
            kinds = tuple(
                _LINEAR if (index + 1) % self.layer_group_size else _FULL
                for index in range(self.num_hidden_layers)
            )
            object.__setattr__(self, "layer_types", kinds)
        super().__attrs_post_init__()
        only(
            self,
            hidden_act=("silu",),
            moe_shared_expert_intermediate_size=(None, self.moe_intermediate_size),
            no_kda_lora=(True,),
            use_bias=(False,),
        )
        if set(self.layer_types or ()) - {_FULL, _LINEAR}:
            raise ValueError(f"layer_types: known are {_FULL}, {_LINEAR}")
        for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            if any(getattr(self, key) or ()):
                raise ValueError(f"{key}: not supported yet")

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim


class GatedLatentAttention(LatentAttention):
    """Latent attention whose heads are scaled by the sigmoid of a projection each."""

    def __init__(self, c: BailingHybridConfig, b: Builder) -> None:
        super().__init__(
            b,
            hidden=c.hidden_size,
            heads=c.heads,
            rank=c.kv_lora_rank,
            nope=c.qk_nope_head_dim,
            value=c.v_head_dim,
            rope=c.rope(),
            q_rank=c.q_lora_rank,
            bias=c.attention_bias,
        )
        self.head_gates = b.linear("g_proj", c.hidden_size, c.heads)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        # fp64, since fp32 rounds by how many numbers there are (`modulm_layers.recurrence`).
        gates = self.head_gates(x).double().sigmoid().to(out.dtype)
        return super().project_out(out * gates.unsqueeze(-1), x)


def _delta_rule(c: BailingHybridConfig, b: Builder) -> KimiDeltaRule:
    return KimiDeltaRule(
        b,
        hidden=c.hidden_size,
        heads=c.heads,
        head_dim=c.head_dim or c.hidden_size // c.heads,
        width=c.short_conv_kernel_size,
        eps=c.rms_norm_eps,
        full_rank=True,
        bound=c.kda_lower_bound if c.kda_safe_gate else None,
    )


class BailingHybridLayer(PreNormLayer):
    """Delta rule or latent attention, then experts; the first layers have none.

    drafts: the layer that drafts has latent attention and experts.
    """

    def __init__(
        self, c: BailingHybridConfig, b: Builder, index: int, *, drafts: bool = False
    ) -> None:
        at, full = b.at("self_attn"), drafts or c.layer_type(index) == _FULL
        sparse = drafts or c.sparse(index)
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            GatedLatentAttention(c, at) if full else _delta_rule(c, at),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp")) if sparse else standard_mlp(c, b),
        )


def _draft_layer(c: BailingHybridConfig, b: Builder, index: int) -> BailingHybridLayer:
    return BailingHybridLayer(c, b, index, drafts=True)


class BailingHybridForCausalLM(DecoderForCausalLM):
    """Ling 3.0 with a language-model head; an additional layer drafts tokens (`mtp`)."""

    api = 1
    config_type = BailingHybridConfig
    layer = BailingHybridLayer

    @classmethod
    def weights(cls, config: BailingHybridConfig) -> WeightNames:
        return evolve(
            without_drafts(config),
            rename=(
                (r"^model\.word_embeddings\.", "model.embed_tokens."),
                (r"\.attention\.", ".self_attn."),
                (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
                (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
                (r"\.forget_gate\.", "."),
            ),
            rewrite=(Rewrite(r"\.A_log$", flatten),),
        )

    @classmethod
    def mtp(cls, config: BailingHybridConfig) -> MtpLayer | None:
        layer = next_token_layer(config, _draft_layer)
        at = f"model.layers.{config.num_hidden_layers}"
        return layer and evolve(layer, norm=f"{at}.final_layernorm", normed=True)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        # For the norm of the delta rule's output, see Qwen3-Next.
        return tiny_config(
            "bailing_hybrid",
            "BailingHybridForCausalLM",
            rms_norm_eps=1e-3,
            num_key_value_heads=4,
            head_dim=16,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=20,
            num_local_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            layer_group_size=2,
            num_nextn_predict_layers=0,
        )
