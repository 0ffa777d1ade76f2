"""The Mamba 2 state space of Bamba and Granite 4, with the keys of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import DecoderConfig, StateSpaceMixer, size

__all__ = ["StateSpaceConfig", "state_space"]


@frozen(kw_only=True)
class StateSpaceConfig(DecoderConfig):
    """A decoder with attention in some layers and a state space in the others."""

    ALIASES: ClassVar[Mapping[str, str]] = {"layers_block_type": "layer_types"}

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


def state_space(c: StateSpaceConfig, b: Builder) -> StateSpaceMixer:
    """The recurrent branch of a layer; `b` points at the layer."""
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
