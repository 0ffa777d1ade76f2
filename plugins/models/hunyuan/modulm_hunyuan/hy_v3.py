"""Hunyuan V3 (Tencent, 2026): normed queries and keys, experts chosen by sigmoids, a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, frozen

from modulm.contracts.model import MtpLayer
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    DecoderForCausalLM,
    PreNormLayer,
    RoutedConfig,
    next_token_layer,
    routed_experts,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
    without_drafts,
)

__all__ = ["HYV3Config", "HYV3ForCausalLM", "HYV3Layer"]

_NORMS = ("q_norm", "k_norm")
_RENAME = (
    (r"\.mlp\.router\.gate\.", ".mlp.gate."),
    (r"\.mlp\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
)


@frozen(kw_only=True)
class HYV3Config(RoutedConfig):
    """config.json of Hunyuan V3. The outputs of experts are added up in fp32 or not
    (`enable_moe_fp32_combine`), which differs by rounding; here the op decides.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    }

    head_dim: int | None = size(128)
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(131072)
    first_k_dense_replace: int = size(1, least=0)
    n_shared_experts: int | None = size(1)
    routed_scaling_factor: float = 2.826
    rope_theta: float = 11_158_840.0


class HYV3Layer(PreNormLayer):
    """The pre-norm block; the first layers have no experts."""

    def __init__(self, c: HYV3Config, b: Builder, index: int) -> None:
        at = b.at("self_attn")
        norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in _NORMS)
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, qk_norm=norms),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b),
        )


class HYV3ForCausalLM(DecoderForCausalLM):
    """Hunyuan V3 with a language-model head; an additional layer drafts tokens (`mtp`)."""

    api = 1
    config_type = HYV3Config
    layer = HYV3Layer

    @classmethod
    def weights(cls, config: HYV3Config) -> WeightNames:
        return evolve(without_drafts(config), rename=_RENAME)

    @classmethod
    def mtp(cls, config: HYV3Config) -> MtpLayer | None:
        drafts = next_token_layer(config, cls.layer)
        if drafts is None:
            return None
        return evolve(drafts, norm=f"{drafts.at}.final_layernorm", normed=True)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "hy_v3",
            "HYV3ForCausalLM",
            head_dim=24,
            num_experts=8,
            num_experts_per_tok=3,
            num_shared_experts=2,
            moe_intermediate_size=32,
            router_scaling_factor=1.5,
        )
