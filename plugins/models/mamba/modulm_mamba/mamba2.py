"""Mamba 2 (Dao and Gu, arXiv 2405.21060): heads with one decay each, and larger states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import StateSpaceMixer, size
from modulm_mamba.mamba import MambaConfig, MixerLayer, RecurrentForCausalLM

__all__ = ["Mamba2Config", "Mamba2ForCausalLM", "Mamba2Layer"]


@frozen(kw_only=True)
class Mamba2Config(MambaConfig):
    """config.json of Mamba 2; `n_groups` is the number of groups of heads that share b and c."""

    num_heads: int = size(128)
    head_dim: int | None = size(64)
    state_size: int = size(128)
    n_groups: int = size(8)
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    tie_word_embeddings: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_heads * self.head_size != self.expand * self.hidden_size:
            raise ValueError(
                f"num_heads: {self.num_heads} heads of {self.head_size} are not "
                f"expand * hidden_size = {self.expand * self.hidden_size}"
            )
        if self.num_heads % self.n_groups:
            raise ValueError(f"n_groups: {self.n_groups} do not divide {self.num_heads} heads")


class Mamba2Layer(MixerLayer):
    """One layer of Mamba 2."""

    def __init__(self, c: Mamba2Config, b: Builder, index: int) -> None:
        norm = b.rms_norm("norm", c.hidden_size, c.rms_norm_eps)
        mixer = StateSpaceMixer(
            b.at("mixer"),
            hidden=c.hidden_size,
            heads=c.num_heads,
            head_dim=c.head_size,
            size=c.state_size,
            groups=c.n_groups,
            width=c.conv_kernel,
            eps=c.rms_norm_eps,
            act=c.hidden_act,
            bias=c.use_bias,
            conv_bias=c.use_conv_bias,
            dt_limit=c.time_step_limit,
        )
        super().__init__(norm, mixer, fp32=c.residual_in_fp32)


class Mamba2ForCausalLM(RecurrentForCausalLM):
    """Mamba 2 with a language-model head."""

    config_type = Mamba2Config
    layer = Mamba2Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 12,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
            "time_step_limit": [0.0, 0.9],
        }
