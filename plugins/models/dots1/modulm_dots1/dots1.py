"""dots.llm1 (rednote, arXiv 2506.05767): many small experts plus shared ones, norms on q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import (
    Attention,
    DecoderForCausalLM,
    PreNormLayer,
    RoutedConfig,
    routed_experts,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["Dots1Config", "Dots1ForCausalLM", "Dots1Layer"]


@frozen(kw_only=True)
class Dots1Config(RoutedConfig):
    """config.json of dots.llm1."""

    ALIASES: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}

    norm_topk_prob: bool = False
    n_shared_experts: int | None = size()
    max_window_layers: int = size(62, least=0)

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        return "sliding_attention" if index >= self.max_window_layers else "full_attention"


def _attention(c: Dots1Config, b: Builder, index: int) -> Attention:
    at = b.at("self_attn")
    norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in ("q_norm", "k_norm"))
    return standard_attention(c, b, index, qk_norm=norms)


class Dots1Layer(PreNormLayer):
    """The pre-norm block; the first layers have no experts."""

    def __init__(self, c: Dots1Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b),
        )


class Dots1ForCausalLM(DecoderForCausalLM):
    """dots.llm1 with a language-model head."""

    api = 1
    config_type = Dots1Config
    layer = Dots1Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "dots1",
            "Dots1ForCausalLM",
            sliding_window=12,
            max_window_layers=2,
            n_routed_experts=6,
            n_shared_experts=2,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
