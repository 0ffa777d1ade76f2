"""OLMo 2 and 3 (arXiv 2501.00656): post-norm: each branch is normed before it is added.

OLMo 3 has windows in three of four layers; rotary scaling applies only to the full ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    Rope,
    parse_rope,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = [
    "Olmo2Config",
    "Olmo2ForCausalLM",
    "Olmo2Layer",
    "Olmo3Config",
    "Olmo3ForCausalLM",
    "normed_attention",
]


#: Default rotary settings of OLMo 3.
_THETA = 500000.0


@frozen(kw_only=True)
class Olmo2Config(DecoderConfig):
    """config.json of OLMo 2."""

    rms_norm_eps: float = 1e-5


@frozen(kw_only=True)
class Olmo3Config(Olmo2Config):
    """config.json of OLMo 3."""

    sliding_window: int | None = size(4096)
    rope_theta: float = _THETA

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.rope_theta != _THETA and not self.rope_parameters:
            raise ValueError(
                f"rope_theta: {self.rope_theta:g} is ambiguous: it could apply to one kind of "
                "layers or to both; use rope_parameters"
            )

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        return "sliding_attention" if (index + 1) % 4 else "full_attention"

    def rope(self, layer_type: str = "") -> Rope:
        nested = self.rope_parameters is not None and layer_type in self.rope_parameters
        if layer_type == "sliding_attention" and not nested:
            plain = {"rope_theta": (self.rope_parameters or {}).get("rope_theta", self.rope_theta)}
            return parse_rope(
                plain, head_size=self.head_size, max_positions=self.max_position_embeddings
            )
        return super().rope(layer_type)


def normed_attention(c: DecoderConfig, b: Builder, index: int, **changes: Any) -> Attention:
    """Attention with queries and keys normed over all heads at once."""
    at = b.at("self_attn")
    q_norm = at.rms_norm("q_norm", c.heads * c.head_size, c.rms_norm_eps)
    k_norm = at.rms_norm("k_norm", c.kv_heads * c.head_size, c.rms_norm_eps)
    return standard_attention(c, b, index, qk_norm=(q_norm, k_norm), norm_whole=True, **changes)


class Olmo2Layer(Module):
    """x + norm(attention(x)), then x + norm(feed-forward(x)). `mlp` replaces the default block;
    `changes` go to the attention layer.
    """

    def __init__(
        self, c: DecoderConfig, b: Builder, index: int, mlp: Module | None = None, **changes: Any
    ) -> None:
        super().__init__()
        self.ops, self.attn = b.ops, normed_attention(c, b, index, **changes)
        self.attn_norm = b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp = mlp or standard_mlp(c, b)
        self.mlp_norm = b.rms_norm("post_feedforward_layernorm", c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x = x if residual is None else self.ops.add(residual, x)
        x = self.ops.add(x, self.attn_norm(self.attn(x, batch)))
        return self.mlp_norm(self.mlp(x)), x


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2 with a language-model head."""

    api = 1
    config_type = Olmo2Config
    layer = Olmo2Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("olmo2", "Olmo2ForCausalLM")


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3 with a language-model head."""

    api = 1
    config_type = Olmo3Config

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "olmo3",
            "Olmo3ForCausalLM",
            sliding_window=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
