"""Ministral 3 for text (Mistral, 2025): queries grow with positions beyond the trained length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import Factory, frozen
from torch import Tensor

from modulm.nn import Builder
from modulm_layers import (
    Attention,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_mlp,
    tiny_config,
)
from modulm_llama.mistral import MistralConfig

__all__ = [
    "GrowingAttention",
    "Ministral3Config",
    "Ministral3ForCausalLM",
    "Ministral3Layer",
]

_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@frozen(kw_only=True)
class Ministral3Config(MistralConfig):
    """config.json of Ministral 3; `llama_4_scaling_beta` is one of the rotary keys."""

    rms_norm_eps: float = 1e-5
    head_dim: int | None = size(128)
    max_position_embeddings: int = size(262144)
    rope_parameters: dict[str, Any] | None = Factory(lambda: dict(_ROPE))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not isinstance(self.growth, int | float):
            raise ValueError(f"llama_4_scaling_beta: {self.growth!r} is not a number")

    @property
    def growth(self) -> float:
        """The growth factor of queries."""
        beta: float = (self.rope_parameters or {}).get("llama_4_scaling_beta", 0.0)
        return beta


class GrowingAttention(Attention):
    """Attention whose queries are scaled by 1 + growth * log(1 + preceding spans)."""

    def __init__(self, c: Ministral3Config, b: Builder) -> None:
        rope = c.rope()
        super().__init__(
            b,
            hidden=c.hidden_size,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_size,
            rope=rope,
            window=c.sliding_window or None,
        )
        self.growth, self.span = c.growth, rope.original
        self.fusable = self.fusable and not self.growth

    def _project(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._project(qkv, positions)
        if not self.growth:
            return q, k, v
        factor = 1 + self.growth * torch.log1p((positions // self.span).float())
        return q * factor[:, None, None].to(q.dtype), k, v


class Ministral3Layer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: Ministral3Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            GrowingAttention(c, b.at("self_attn")),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class Ministral3ForCausalLM(DecoderForCausalLM):
    """Ministral 3 (text) with a language-model head."""

    api = 1
    config_type = Ministral3Config
    layer = Ministral3Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        rope = {**_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
        return tiny_config(
            "ministral3",
            "Ministral3ForCausalLM",
            head_dim=24,
            sliding_window=40,
            rope_parameters=rope,
        )
