"""Granite 4 (IBM, 2025): state-space layers, a few attention layers, experts plus a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder
from modulm_granite.granite import GraniteForCausalLM, ScaledLayer
from modulm_granite.moe import EXPERT_NAMES, granite_experts, granite_shared
from modulm_granite.state_space import StateSpaceConfig, state_space
from modulm_layers import Attention, size, standard_attention, tiny_config

__all__ = ["GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridLayer"]

_RECURRENT = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")


@frozen(kw_only=True)
class GraniteMoeHybridConfig(StateSpaceConfig):
    """config.json of Granite 4; without experts only the shared feed-forward block exists."""

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0
    num_local_experts: int = size(8, least=0)
    num_experts_per_tok: int = size(2, least=0)
    shared_intermediate_size: int = size(1024)
    position_embedding_type: str | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        unknown = set(self.layer_types or ()) - {*_RECURRENT, *_ATTENTION}
        if unknown:
            raise ValueError(f"layer_types: {sorted(unknown)} are neither recurrent nor attention")
        if self.position_embedding_type not in (None, "nope", "rope"):
            raise ValueError(
                f"position_embedding_type: not supported yet: {self.position_embedding_type!r}"
            )

    def recurrent(self, index: int) -> bool:
        """Whether layer `index` is a state-space layer; all are by default."""
        return self.layer_type(index) not in _ATTENTION


class GraniteMoeHybridLayer(ScaledLayer):
    """A state-space or attention branch, then the feed-forward one."""

    def __init__(self, c: GraniteMoeHybridConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            state_space(c, b) if c.recurrent(index) else _attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            granite_experts(c, b) if c.num_local_experts else granite_shared(c, b),
            c.residual_multiplier,
        )


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite 4 with a language-model head."""

    config_type = GraniteMoeHybridConfig
    layer = GraniteMoeHybridLayer
    names = EXPERT_NAMES

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=6,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            position_embedding_type="rope",
            mamba_n_heads=8,
            mamba_n_groups=2,
            mamba_d_state=12,
            mamba_d_head=16,
            mamba_chunk_size=16,
            embedding_multiplier=1.5,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
            logits_scaling=1.3,
        )


def _attention(c: GraniteMoeHybridConfig, b: Builder, index: int) -> Attention:
    rope = c.rope(c.layer_type(index)) if c.position_embedding_type == "rope" else None
    return standard_attention(c, b, index, scale=c.attention_multiplier, rope=rope)
