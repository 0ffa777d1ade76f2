"""Ouro (ByteDance, arXiv 2510.25741): the same layers run several times, norms around branches.

Each run has keys and values of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder, WeightNames
from modulm_layers import DecoderConfig, SandwichLayer, size, standard_mlp, tiny_config
from modulm_ouro.looped import LoopedAttention, LoopedForCausalLM

__all__ = ["OuroConfig", "OuroForCausalLM", "OuroLayer"]


@frozen(kw_only=True)
class OuroConfig(DecoderConfig):
    """config.json of Ouro: `total_ut_steps` is how often the layers run.

    `early_exit_threshold` below 1, which ends the runs of single tokens early, is rejected.
    """

    total_ut_steps: int = size(4)
    early_exit_threshold: float = 1.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.early_exit_threshold < 1:
            raise ValueError(
                f"early_exit_threshold: not supported yet: {self.early_exit_threshold}"
            )


class OuroLayer(SandwichLayer):
    """norm, attention, norm, add; norm, feed-forward, norm, add."""

    attn: LoopedAttention

    def __init__(self, c: OuroConfig, b: Builder, index: int) -> None:
        def norm(name: str) -> Any:
            return b.rms_norm(name, c.hidden_size, c.rms_norm_eps)

        super().__init__(
            norm("input_layernorm"),
            LoopedAttention(c, b.at("self_attn"), index, c.total_ut_steps),
            norm("input_layernorm_2"),
            norm("post_attention_layernorm"),
            standard_mlp(c, b),
            norm("post_attention_layernorm_2"),
        )


class OuroForCausalLM(LoopedForCausalLM):
    """Ouro with a language-model head."""

    api = 1
    config_type = OuroConfig
    layer = OuroLayer
    loops_key = "total_ut_steps"
    names = WeightNames(ignore=(r"^model\.early_exit_gate\.",))
    oracle = "modulm_ouro.oracle:AsLlama"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("ouro", "OuroForCausalLM", num_hidden_layers=2, total_ut_steps=3)
