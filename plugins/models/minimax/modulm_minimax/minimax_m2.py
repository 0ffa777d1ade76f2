"""MiniMax M2 (MiniMax, 2025): sigmoid routing, and norms over all heads of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve, field, frozen, validators

from modulm.nn import Builder, WeightNames
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    MoE,
    PreNormLayer,
    Rope,
    Routing,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["MiniMaxM2Config", "MiniMaxM2ForCausalLM", "MiniMaxM2Layer"]

_NAMES = ExpertNames(gate="w1", up="w3", down="w2", choice_bias="e_score_correction_bias")


@frozen(kw_only=True)
class MiniMaxM2Config(DecoderConfig):
    """config.json of MiniMax M2; `rotary_dim` dimensions of each head are rotated."""

    ALIASES: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}

    head_dim: int | None = size(128)
    max_position_embeddings: int = size(196608)
    rope_theta: float = 5000000.0
    rotary_dim: int | None = size(None)
    num_local_experts: int = size()
    num_experts_per_tok: int = size()
    scoring_func: str = field(default="sigmoid", validator=validators.in_(("sigmoid",)))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} of {self.num_local_experts}"
            )

    def rope(self, layer_type: str = "") -> Rope:
        rope = super().rope(layer_type)
        return rope if self.rotary_dim is None else evolve(rope, size=self.rotary_dim)


def _attention(c: MiniMaxM2Config, b: Builder, index: int) -> Attention:
    at, width = b.at("self_attn"), c.head_size
    q_norm = at.rms_norm("q_norm", c.heads * width, c.rms_norm_eps)
    k_norm = at.rms_norm("k_norm", c.kv_heads * width, c.rms_norm_eps)
    return standard_attention(c, b, index, qk_norm=(q_norm, k_norm), norm_whole=True)


class MiniMaxM2Layer(PreNormLayer):
    """The pre-norm block with experts in every layer."""

    def __init__(self, c: MiniMaxM2Config, b: Builder, index: int) -> None:
        experts = MoE(
            b.at("block_sparse_moe"),
            hidden=c.hidden_size,
            inner=c.inner_size,
            experts=c.num_local_experts,
            routing=Routing(c.num_experts_per_tok, scoring=c.scoring_func),
            act=c.hidden_act,
            choice_bias=True,
            names=_NAMES,
        )
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            experts,
        )


class MiniMaxM2ForCausalLM(DecoderForCausalLM):
    """MiniMax M2 with a language-model head; drafting layers are not loaded."""

    api = 1
    config_type = MiniMaxM2Config
    layer = MiniMaxM2Layer
    names = WeightNames(
        rename=((r"\.mlp\.", ".block_sparse_moe."),), ignore=(r"^model\.mtp_modules\.",)
    )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "minimax_m2",
            "MiniMaxM2ForCausalLM",
            head_dim=24,
            rotary_dim=12,
            intermediate_size=32,
            num_local_experts=6,
            num_experts_per_tok=2,
        )
