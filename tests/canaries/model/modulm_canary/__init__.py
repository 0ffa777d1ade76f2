"""Canary: a decoder with norms on queries and keys, written by docs/plugins-model.md of 0.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Attention, Builder, DecoderConfig, DecoderForCausalLM, tiny_config

__all__ = ["CanaryConfig", "CanaryForCausalLM", "CanaryLayer", "CanaryMLP"]


@frozen(kw_only=True)
class CanaryConfig(DecoderConfig):
    """The common keys."""


class CanaryMLP(Module):
    """down(silu(gate(x)) * up(x)), from the builder's own linear layers."""

    def __init__(self, b: Builder, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = b.linear("gate_up_proj", hidden, {"gate_proj": inner, "up_proj": inner})
        self.down = b.row_linear("down_proj", inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class CanaryLayer(Module):
    def __init__(self, c: CanaryConfig, b: Builder, index: int) -> None:
        super().__init__()
        at = b.at("self_attn")
        norms = (
            at.rms_norm("q_norm", c.head_size, c.rms_norm_eps),
            at.rms_norm("k_norm", c.head_size, c.rms_norm_eps),
        )
        self.attn_norm = b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(
            at,
            hidden=c.hidden_size,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_size,
            rope=c.rope(c.layer_type(index)),
            window=c.window(index),
            qk_norm=norms,
        )
        self.mlp_norm = b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp = CanaryMLP(b.at("mlp"), c.hidden_size, c.intermediate_size)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        x, residual = self.attn_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attn(x, batch), residual)
        return self.mlp(x), residual


class CanaryForCausalLM(DecoderForCausalLM):
    api = 1
    config_type = CanaryConfig
    layer = CanaryLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("qwen3", "Qwen3ForCausalLM", head_dim=16)
