"""Jamba (AI21, arXiv 2403.19887): Mamba, attention without positions in some layers, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch.nn import Module

from modulm.nn import Builder, Norm
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    GatedMLP,
    MoE,
    PreNormLayer,
    Routing,
    size,
    standard_attention,
    tiny_config,
)
from modulm_mamba.mamba import MambaMixer, narrow_rank

__all__ = ["JambaConfig", "JambaForCausalLM", "JambaLayer"]


@frozen(kw_only=True)
class JambaConfig(DecoderConfig):
    """config.json of Jamba.

    One of every `attn_layer_period` layers is attention, the others are state-space layers. One of
    every `expert_layer_period` has experts, if there is more than one.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    max_position_embeddings: int = size(262144)
    num_experts: int = size(16)
    num_experts_per_tok: int = size(2)
    expert_layer_period: int = size(2)
    expert_layer_offset: int = size(1, least=0)
    attn_layer_period: int = size(8)
    attn_layer_offset: int = size(4, least=0)
    mamba_d_state: int = size(16)
    mamba_d_conv: int = size(4, least=2)
    mamba_expand: int = size(2)
    mamba_dt_rank: Any = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        narrow_rank("mamba_dt_rank", self.mamba_dt_rank, self.hidden_size)
        periods = {
            "attn_layer_offset": (self.attn_layer_offset, self.attn_layer_period),
            "expert_layer_offset": (self.expert_layer_offset, self.expert_layer_period),
        }
        for key, (offset, period) in periods.items():
            if offset >= period:
                raise ValueError(f"{key}: {offset} is beyond the period of {period} layers")
        if self.num_experts_per_tok > self.num_experts > 1:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} of {self.num_experts}"
            )

    def attends(self, index: int) -> bool:
        """Whether layer `index` has attention instead of a state space."""
        return index % self.attn_layer_period == self.attn_layer_offset

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        chosen = index % self.expert_layer_period == self.expert_layer_offset
        return chosen and self.num_experts > 1


def _mixer(c: JambaConfig, b: Builder, index: int) -> Module:
    if c.attends(index):
        return standard_attention(c, b, index, rope=None)
    at = b.at("mamba")
    rank = narrow_rank("mamba_dt_rank", c.mamba_dt_rank, c.hidden_size)
    widths = {"dt": rank, "b": c.mamba_d_state, "c": c.mamba_d_state}
    return MambaMixer(
        at,
        hidden=c.hidden_size,
        inner=c.mamba_expand * c.hidden_size,
        state=c.mamba_d_state,
        rank=rank,
        width=c.mamba_d_conv,
        act=c.hidden_act,
        bias=c.mamba_proj_bias,
        conv_bias=c.mamba_conv_bias,
        norms=[at.rms_norm(f"{n}_layernorm", width, c.rms_norm_eps) for n, width in widths.items()],
    )


def _feed_forward(c: JambaConfig, b: Builder, index: int) -> Module:
    at = b.at("feed_forward")
    if not c.sparse(index):
        return GatedMLP(at, c.hidden_size, c.inner_size, c.hidden_act)
    return MoE(
        at,
        hidden=c.hidden_size,
        inner=c.inner_size,
        experts=c.num_experts,
        routing=Routing(c.num_experts_per_tok, renormalise=False),
        act=c.hidden_act,
        names=ExpertNames(router="router"),
    )


class JambaLayer(PreNormLayer):
    """Mamba or attention, then a feed-forward part or experts."""

    def __init__(self, c: JambaConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _mixer(c, b, index),
            b.rms_norm("pre_ff_layernorm", c.hidden_size, c.rms_norm_eps),
            _feed_forward(c, b, index),
        )


class JambaForCausalLM(DecoderForCausalLM):
    """Jamba with a language-model head."""

    api = 1
    config_type = JambaConfig
    layer = JambaLayer

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("final_layernorm", config.hidden_size, config.rms_norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "jamba",
            "JambaForCausalLM",
            num_hidden_layers=4,
            attn_layer_period=3,
            attn_layer_offset=1,
            num_experts=4,
            mamba_d_state=8,
            mamba_dt_rank=6,
        )
