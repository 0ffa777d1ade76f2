"""Bamba (IBM, Princeton, CMU and UIUC, 2024): state spaces, and attention in a few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch.nn import Module

from modulm.nn import (
    Builder,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLP,
    Norm,
    PreNormLayer,
    StateSpaceMixer,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["BambaConfig", "BambaForCausalLM", "BambaLayer"]


@frozen(kw_only=True)
class BambaConfig(DecoderConfig):
    """config.json of Bamba; `attn_layer_indices` names the layers with attention."""

    ALIASES: ClassVar[Mapping[str, str]] = {"layers_block_type": "layer_types"}

    max_position_embeddings: int = size(262144)
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    attn_layer_indices: tuple[int, ...] = ()
    mamba_n_heads: int = size(128)
    mamba_n_groups: int = size(1)
    mamba_d_state: int = size(256)
    mamba_d_conv: int = size(4, least=2)
    mamba_expand: int = size(2)
    mamba_d_head: Any = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        beyond = [i for i in self.attn_layer_indices if not 0 <= i < self.num_hidden_layers]
        if beyond:
            raise ValueError(
                f"attn_layer_indices: {beyond} of {self.num_hidden_layers} layers, from 0"
            )
        if self.mamba_expand * self.hidden_size % self.mamba_n_heads:
            raise ValueError("mamba_n_heads: does not divide mamba_expand * hidden_size")
        if self.mamba_d_head not in ("auto", self.state_head_size):
            raise ValueError(
                f'mamba_d_head: {self.mamba_d_head!r} is neither "auto" nor '
                f"mamba_expand * hidden_size / mamba_n_heads = {self.state_head_size}"
            )
        if self.mamba_n_heads % self.mamba_n_groups:
            raise ValueError("mamba_n_groups: does not divide mamba_n_heads")

    @property
    def state_head_size(self) -> int:
        """Dimensions of one head of a recurrent layer."""
        return self.mamba_expand * self.hidden_size // self.mamba_n_heads


def _branch(c: BambaConfig, b: Builder, index: int) -> Module:
    """Attention, or a state space."""
    if index in c.attn_layer_indices:
        return standard_attention(c, b, index)
    return StateSpaceMixer(
        b.at("mamba"),
        hidden=c.hidden_size,
        heads=c.mamba_n_heads,
        head_dim=c.state_head_size,
        size=c.mamba_d_state,
        groups=c.mamba_n_groups,
        width=c.mamba_d_conv,
        eps=c.rms_norm_eps,
        act=c.hidden_act,
        bias=c.mamba_proj_bias,
        conv_bias=c.mamba_conv_bias,
        dt_limit=c.time_step_limit,
    )


class BambaLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: BambaConfig, b: Builder, index: int) -> None:
        at, inner, act = b.at("feed_forward"), c.inner_size, c.hidden_act
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _branch(c, b, index),
            b.rms_norm("pre_ff_layernorm", c.hidden_size, c.rms_norm_eps),
            GatedMLP(at, c.hidden_size, inner, act, bias=c.mlp_bias),
        )


class BambaForCausalLM(DecoderForCausalLM):
    """Bamba with a language-model head."""

    api = 1
    config_type = BambaConfig
    layer = BambaLayer

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("final_layernorm", config.hidden_size, config.rms_norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "bamba",
            "BambaForCausalLM",
            attn_layer_indices=[1],
            mamba_n_heads=8,
            mamba_n_groups=2,
            mamba_d_state=12,
            mamba_d_head=16,
            mamba_chunk_size=16,
        )
