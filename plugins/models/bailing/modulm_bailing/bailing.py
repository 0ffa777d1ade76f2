"""Ling and Ring 2.0 (inclusionAI, 2025): many small experts in groups, plus a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, frozen

from modulm.nn import Builder, WeightNames
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderForCausalLM,
    ExpertNames,
    PreNormLayer,
    RoutedConfig,
    only,
    routed_experts,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
    without_drafts,
)

__all__ = ["BailingMoeV2Config", "BailingMoeV2ForCausalLM", "BailingMoeV2Layer"]


@frozen(kw_only=True)
class BailingMoeV2Config(RoutedConfig):
    """config.json of Ling and Ring 2.0."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    }

    use_bias: bool = False
    use_qk_norm: bool = True
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    moe_shared_expert_intermediate_size: int | None = size(None)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            use_bias=(False,),
            score_function=("sigmoid",),
            moe_router_enable_expert_bias=(True,),
            moe_shared_expert_intermediate_size=(None, self.shared_size),
        )

    @property
    def shared_size(self) -> int:
        """What `moe_shared_expert_intermediate_size` must be: the width of one shared expert."""
        return self.moe_intermediate_size


def _attention(c: BailingMoeV2Config, b: Builder, index: int) -> Attention:
    at, norms = b.at("attention"), None
    if c.use_qk_norm:
        names = ("query_layernorm", "key_layernorm")
        norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in names)
    return standard_attention(
        c,
        b,
        index,
        at="attention",
        out_bias=False,
        qk_norm=norms,
        names=AttentionNames(out="dense", qkv="query_key_value"),
    )


class BailingMoeV2Layer(PreNormLayer):
    """The pre-norm block; the first layers have no experts."""

    def __init__(self, c: BailingMoeV2Config, b: Builder, index: int) -> None:
        names = ExpertNames(choice_bias="gate.expert_bias")
        biased, experts = c.moe_router_enable_expert_bias, None
        if c.sparse(index):
            experts = routed_experts(c, b.at("mlp"), names=names, choice_bias=biased)
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            experts or standard_mlp(c, b),
        )


class BailingMoeV2ForCausalLM(DecoderForCausalLM):
    """Ling and Ring 2.0 with a language-model head."""

    api = 1
    config_type = BailingMoeV2Config
    layer = BailingMoeV2Layer
    oracle = "modulm_bailing.oracle:AsGlm4Moe"

    @classmethod
    def weights(cls, config: BailingMoeV2Config) -> WeightNames:
        renamed = ((r"^model\.word_embeddings\.", "model.embed_tokens."),)
        return evolve(without_drafts(config), rename=renamed)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "bailing_moe_v2",
            "BailingMoeV2ForCausalLM",
            head_dim=24,
            partial_rotary_factor=0.5,
            use_qkv_bias=True,
            num_experts=8,
            num_shared_experts=1,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
        )
