"""Qwen3-Next (Qwen team, 2025): a gated delta rule, some layers gated attention, and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, StateSpec
from modulm.nn import (
    Attention,
    Builder,
    CausalConv,
    DecoderForCausalLM,
    Norm,
    PreNormLayer,
    Rewrite,
    WeightNames,
    single_rank,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)
from modulm_qwen.moe import Qwen2MoeConfig, SharedExperts
from modulm_qwen.qwen2 import QwenConfig

__all__ = [
    "DeltaKeys",
    "GatedDeltaNet",
    "Qwen3NextConfig",
    "Qwen3NextForCausalLM",
    "Qwen3NextLayer",
    "gated_attention",
    "offset_norm",
    "split_gate",
    "tiny_delta",
]


@frozen(kw_only=True, slots=False)
class DeltaKeys(QwenConfig):
    """The keys of all models with gated delta rules; `linear_` ones describe those layers.

    Without slots, so that a class can have these keys and those of experts.
    """

    head_dim: int | None = size(256)
    partial_rotary_factor: float = 0.25
    full_attention_interval: int = size(4)
    linear_conv_kernel_dim: int = size(4, least=2)
    linear_key_head_dim: int = size(128)
    linear_value_head_dim: int = size(128)
    linear_num_key_heads: int = size(16)
    linear_num_value_heads: int = size(32)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError("linear_num_key_heads: does not divide linear_num_value_heads")

    def recurrent(self, index: int) -> bool:
        """Whether layer `index` keeps a state."""
        if self.layer_types is None:
            return bool((index + 1) % self.full_attention_interval)
        return self.layer_types[index] == "linear_attention"


@frozen(kw_only=True)
class Qwen3NextConfig(DeltaKeys, Qwen2MoeConfig):
    """config.json of Qwen3-Next."""

    num_experts_per_tok: int = size(10)
    norm_topk_prob: bool = True


class GatedDeltaNet(Module):
    """Linear attention with the gated delta rule (Yang et al., arXiv 2412.06464).

    Each value head keeps a matrix from keys to values. A token lets it fade, reads what it holds
    for the token's key, and moves that towards the token's value.
    """

    a_log: Tensor
    dt_bias: Tensor

    def __init__(self, c: DeltaKeys, b: Builder) -> None:
        super().__init__()
        single_rank(b)
        self.key_heads, self.heads = c.linear_num_key_heads, c.linear_num_value_heads
        key_dim, value_dim = c.linear_key_head_dim, c.linear_value_head_dim
        each = self.heads // self.key_heads
        self.per_head = [key_dim, key_dim, each * value_dim, each * value_dim]
        keys, values = self.key_heads * key_dim, self.heads * value_dim
        self.widths = [keys, keys, values]
        self._make_inputs(b, c.hidden_size, keys, values)
        width = c.linear_conv_kernel_dim
        self.conv = CausalConv(b, "conv1d", sum(self.widths), width, bias=False, act=c.hidden_act)
        b.parameter("A_log", self, "a_log", (self.heads,), torch.float32)
        b.parameter("dt_bias", self, "dt_bias", (self.heads,), torch.float32)
        self.norm = b.rms_norm("norm", value_dim, c.rms_norm_eps)
        self.out = b.row_linear("out_proj", values, c.hidden_size)
        state = ("state", (self.heads, key_dim, value_dim), "float32")
        self.cache = b.cache(StateSpec((("conv", self.conv.state, b.dtype), state)))
        self.rule = b.ops.delta_rule

    def _make_inputs(self, b: Builder, hidden: int, keys: int, values: int) -> None:
        """The layers that read the stream."""
        self.project = b.linear("in_proj_qkvz", hidden, 2 * (keys + values))
        self.rates = b.linear("in_proj_ba", hidden, 2 * self.heads)

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values side by side, and the gate [tokens, heads * value dim]."""
        parts = self.project(x).view(x.shape[0], self.key_heads, -1).split(self.per_head, -1)
        return torch.cat([part.flatten(1) for part in parts[:3]], -1), parts[3].flatten(1)

    def _steps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What says how far a token moves the state, and how far that fades: [tokens, heads]."""
        rates = self.rates(x).view(x.shape[0], self.key_heads, 2, -1)
        return rates[:, :, 0].flatten(1), rates[:, :, 1].flatten(1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan, tokens = batch.caches[self.cache], batch.plan(self.cache), x.shape[0]
        qkv, gate = self._inputs(x)
        gate = gate.reshape(tokens, self.heads, -1)
        q, k, v = self.conv(qkv, cache["conv"], plan).split(self.widths, -1)
        beta, decay = self._rates(x)
        q, k = (_unit(part.reshape(tokens, self.key_heads, -1)) for part in (q, k))
        q, v = q * q.shape[-1] ** -0.5, v.reshape(tokens, self.heads, -1)
        y = self.rule(q, k, v, beta, decay, cache["state"], plan).to(x.dtype)
        y = self.norm(y) * F.silu(gate.float())
        mixed: Tensor = self.out(y.to(x.dtype).flatten(1))
        return mixed

    def _rates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """How far a token moves the state, and the log of how far that fades before: fp32.

        Both are [tokens, heads].
        """
        beta, step = self._steps(x)
        fade = -self.a_log.exp() * F.softplus(step.float() + self.dt_bias)
        return beta.float().sigmoid(), fade


class Qwen3NextLayer(PreNormLayer):
    """Delta rule or gated attention, then experts beside a shared one."""

    def __init__(self, c: Qwen3NextConfig, b: Builder, index: int) -> None:
        super().__init__(
            offset_norm(c, b, "input_layernorm"),
            GatedDeltaNet(c, b.at("linear_attn"))
            if c.recurrent(index)
            else gated_attention(c, b, index),
            offset_norm(c, b, "post_attention_layernorm"),
            SharedExperts(c, b) if c.sparse(index) else standard_mlp(c, b),
        )


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """Qwen3-Next with a language-model head."""

    api = 1
    config_type = Qwen3NextConfig
    layer = Qwen3NextLayer

    @classmethod
    def weights(cls, config: Qwen3NextConfig) -> WeightNames:
        return WeightNames(ignore=(r"^mtp\.",), rewrite=(split_gate(config.heads),))

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return offset_norm(config, b, "norm")

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_delta(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            mlp_only_layers=[2],
        )


def tiny_delta(model_type: str, architecture: str, **changes: Any) -> Mapping[str, Any]:
    """config.json of a tiny checkpoint with delta rules around attention."""
    # What a random delta rule gives is small: with eps 1e-6 its norm would raise rounding so
    # far that transformers in fp32 is 1e-4 from itself in fp64.
    return tiny_config(
        model_type,
        architecture,
        rms_norm_eps=1e-3,
        head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=12,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        **changes,
    )


def split_gate(heads: int) -> Rewrite:
    """Queries and the gate of what they attend to, which are stored together, head by head."""

    def change(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        halves = tensor.unflatten(0, (heads, 2, -1))
        yield name, halves[:, 0].flatten(0, 1)
        yield name.replace("q_proj", "q_gate"), halves[:, 1].flatten(0, 1)

    return Rewrite(r"\.q_proj\.", change)


def offset_norm(c: QwenConfig, b: Builder, name: str, width: int | None = None) -> Norm:
    """An RMS norm whose weight is stored less one, over the hidden size or `width`."""
    return b.rms_norm(name, width or c.hidden_size, c.rms_norm_eps, offset=1.0)


def gated_attention(c: QwenConfig, b: Builder, index: int) -> Attention:
    """Attention whose result a gate scales."""
    at = b.at("self_attn")
    norms = tuple(offset_norm(c, at, name, c.head_size) for name in ("q_norm", "k_norm"))
    return standard_attention(c, b, index, qk_norm=norms, gate="q_gate")


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
