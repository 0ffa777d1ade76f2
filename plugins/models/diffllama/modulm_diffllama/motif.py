"""Motif 2.6B (Motif Technologies, arXiv 2508.09148): differential attention whose heads are paired
one by one, and polynomials in the feed-forward block (PolyNorm, arXiv 2411.03884).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.nn import Builder
from modulm_diffllama.diffllama import (
    DifferentialAttention,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
)
from modulm_layers import GatedMLP, PreNormLayer, only, tiny_config

__all__ = ["MotifConfig", "MotifForCausalLM", "MotifLayer", "PolyNorm"]


@frozen(kw_only=True)
class MotifConfig(DiffLlamaConfig):
    """config.json of Motif 2.6B. Attention in groups, as in Motif 12.7B (`num_noise_heads`), is
    rejected.
    """

    rms_norm_eps: float = 1e-6
    attn_rms_norm_eps: float = 1e-5
    hidden_act: str = "poly_norm"
    use_bias: bool = False
    use_sliding_window: bool = False
    num_noise_heads: int | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            hidden_act=("poly_norm",),
            num_noise_heads=(None,),
            use_bias=(False,),
            use_sliding_window=(False,),
        )


class PolyNorm(Module):
    """w0 norm(x^3) + w1 norm(x^2) + w2 norm(x) + b, with RMS norms over the last dimension."""

    weight: Tensor
    bias: Tensor

    def __init__(self, b: Builder) -> None:
        super().__init__()
        b.parameter("weight", self, "weight", (3,), dtype=torch.float32)
        b.parameter("bias", self, "bias", (1,), dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, width] -> [tokens, width], computed in fp32."""
        wide, total = x.float(), self.bias
        for weight, power in zip(self.weight, (wide**3, wide**2, wide), strict=True):
            total = total + weight * power * (power.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return total.to(x.dtype)


class PolyMLP(GatedMLP):
    """down(polynorm(gate(x)) * up(x))."""

    def __init__(self, c: MotifConfig, b: Builder) -> None:
        super().__init__(b, c.hidden_size, c.inner_size)
        self.poly = PolyNorm(b.at("act_fn"))

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(self.poly(gate) * up)
        return out


class MotifAttention(DifferentialAttention):
    """Heads 2h and 2h + 1 are a pair, as are their values; a pair's norm has a weight."""

    def make_norm(self, c: Any, b: Builder) -> Module:
        norm: Module = b.rms_norm("subln", 2 * c.head_size, c.attn_rms_norm_eps)
        return norm

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            part.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) for part in super().project(x)
        )
        return q, k, v


class MotifLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: MotifConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            MotifAttention(c, b.at("self_attn"), index - 1),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            PolyMLP(c, b.at("mlp")),
        )


class MotifForCausalLM(DiffLlamaForCausalLM):
    """Motif 2.6B with a language-model head."""

    config_type = MotifConfig
    layer = MotifLayer
    oracle = "modulm_diffllama.oracle:AsDiffLlama"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "motif", "MotifForCausalLM", num_attention_heads=8, num_key_value_heads=4
        )
