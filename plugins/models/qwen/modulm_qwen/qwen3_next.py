"""Qwen3-Next (Qwen team, 2025): gated delta rules, gated attention in some layers, and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, MtpLayer, StateSpec
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Norm, Rewrite, WeightNames
from modulm.nn.linear import Linear
from modulm_layers import (
    Attention,
    CausalConv,
    DecoderForCausalLM,
    PreNormLayer,
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
    "delta_mtp",
    "offset_norm",
    "split_gate",
    "tiny_delta",
]


@frozen(kw_only=True, slots=False)
class DeltaKeys(QwenConfig):
    """Keys of all models with gated delta rules; `linear_` ones describe those layers.

    Without slots, so that a class can inherit these and the keys of experts.
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
        """Whether layer `index` has a delta rule."""
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

    Each value head has a matrix from keys to values. Each token decays the matrix, reads the value
    stored for its key and moves it towards its own value.
    """

    a_log: Tensor
    dt_bias: Tensor

    def __init__(self, c: DeltaKeys, b: Builder) -> None:
        super().__init__()
        key_heads, heads = c.linear_num_key_heads, c.linear_num_value_heads
        key_dim, value_dim = c.linear_key_head_dim, c.linear_value_head_dim
        self.key_heads, self.heads = b.share(key_heads, 1), b.share(heads)
        keys, values = key_heads * key_dim, heads * value_dim
        rank_sizes = [self.key_heads * key_dim, self.heads * value_dim]
        self.widths, self.inputs = (
            [rank_sizes[0], *rank_sizes],
            [2 * rank_sizes[0] + rank_sizes[1], rank_sizes[1]],
        )
        sizes, least = [keys, keys, values], [key_dim, key_dim, value_dim]
        self.gate: Linear | None = None
        if b.ranks == 1:
            parts = {"in_proj_qkv": sum(sizes), "in_proj_z": values}
            self.project = b.linear("in_proj_qkvz", c.hidden_size, parts)
        else:
            self.project = b.pieces("in_proj_qkv", c.hidden_size, sizes, least)
            self.gate = b.linear("in_proj_z", c.hidden_size, values)
        rates = {"in_proj_b": heads, "in_proj_a": heads}
        self.rates = b.linear("in_proj_ba", c.hidden_size, rates)
        width = c.linear_conv_kernel_dim
        self.conv = CausalConv(b, "conv1d", sizes, width, bias=False, act=c.hidden_act, least=least)
        for name, attribute in (("A_log", "a_log"), ("dt_bias", "dt_bias")):
            b.cut_parameter(name, self, attribute, (b.shard(heads),), dtype=torch.float32)
        self.norm = b.rms_norm("norm", value_dim, c.rms_norm_eps)
        self.out = b.row_linear("out_proj", values, c.hidden_size)
        state = ("state", (self.heads, key_dim, value_dim), "float32")
        self.cache = b.cache(StateSpec((("conv", self.conv.state, b.dtype), state)))
        self.ops = b.ops

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan, tokens = batch.caches[self.cache], batch.plan(self.cache), x.shape[0]
        qkv = self.project(x)
        if self.gate is None:
            qkv, gate = qkv.split(self.inputs, -1)
        else:
            gate = self.gate(x)
        q, k, v = self.conv(qkv, cache["conv"], plan).split(self.widths, -1)
        beta, step = self.rates(x).chunk(2, -1)
        y = self.ops.delta_rule(
            q.view(tokens, self.key_heads, -1),
            k.view(tokens, self.key_heads, -1),
            v.view(tokens, self.heads, -1),
            beta,
            step,
            self.a_log,
            self.dt_bias,
            cache["state"],
            plan,
        )
        norm = self.norm
        normed = self.ops.gated_rms_norm(
            y.flatten(1), gate, norm.weight, norm.eps, self.heads, norm_first=True
        )
        mixed: Tensor = self.out(normed)
        return mixed


class Qwen3NextLayer(PreNormLayer):
    """Delta rule or gated attention, then experts plus a shared one."""

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
        return WeightNames(
            ignore=(r"^mtp\.",), rewrite=(split_gate(config.heads), *_split_inputs(config))
        )

    @classmethod
    def mtp(cls, config: Qwen3NextConfig) -> MtpLayer | None:
        return delta_mtp(config, cls.layer)

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


def delta_mtp(c: DeltaKeys, layer: Callable[[Any, Builder, int], Module]) -> MtpLayer:
    """Build the drafting layer, like the last one with attention; `layer` builds layers."""
    like = max(index for index in range(c.num_hidden_layers) if not c.recurrent(index))
    return MtpLayer(
        layer=lambda b: layer(c, b, like),
        at="mtp.layers.0",
        hidden=c.hidden_size,
        eps=c.rms_norm_eps,
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        project="mtp.fc",
        norm="mtp.norm",
        offset=1.0,
        normed=True,
    )


def tiny_delta(model_type: str, architecture: str, **changes: Any) -> Mapping[str, Any]:
    """config.json of a tiny checkpoint with delta rules around attention."""
    # A random delta rule has small outputs: with eps 1e-6 its norm would amplify rounding so much
    # that transformers in fp32 differs from itself in fp64 by 1e-4.
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


def _by_outputs(name: str) -> None:
    """Reject tensors of quantizations that cannot be split by outputs."""
    if not name.endswith((".weight", ".bias", ".weight_scale", ".weight_scale_inv")):
        raise UnsupportedError(f"{name}: not supported yet in this quantization")


def split_gate(heads: int) -> Rewrite:
    """Split the projection of queries and gate, which are stored together per head."""

    def change(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        _by_outputs(name)
        halves = tensor.unflatten(0, (heads, 2, -1))
        yield name, halves[:, 0].flatten(0, 1)
        yield name.replace("q_proj", "q_gate"), halves[:, 1].flatten(0, 1)

    return Rewrite(r"\.q_proj\.", change)


def _split_inputs(c: Qwen3NextConfig) -> tuple[Rewrite, ...]:
    """Split weights that Qwen3-Next stores by key heads."""
    key_heads, each = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
    keys, values = c.linear_key_head_dim, each * c.linear_value_head_dim

    def inputs(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        _by_outputs(name)
        heads = tensor.unflatten(0, (key_heads, -1))
        block = 2 * (keys + values) // heads.shape[1]
        sizes = [size // block for size in (keys, keys, values, values)]
        *qkv, gate = (part.flatten(0, 1) for part in heads.split(sizes, 1))
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat(qkv)
        yield name.replace("in_proj_qkvz", "in_proj_z"), gate

    def rates(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        _by_outputs(name)
        heads = tensor.unflatten(0, (key_heads, 2, -1))
        for index, part in enumerate(("in_proj_b", "in_proj_a")):
            yield name.replace("in_proj_ba", part), heads[:, index].flatten(0, 1)

    return Rewrite(r"\.in_proj_qkvz\.", inputs), Rewrite(r"\.in_proj_ba\.", rates)


def offset_norm(c: QwenConfig, b: Builder, name: str, width: int | None = None) -> Norm:
    """An RMS norm whose weight is stored minus one, over the hidden size or `width`."""
    return b.rms_norm(name, width or c.hidden_size, c.rms_norm_eps, offset=1.0)


def gated_attention(c: QwenConfig, b: Builder, index: int) -> Attention:
    """Attention with a sigmoid gate on its output."""
    at = b.at("self_attn")
    norms = tuple(offset_norm(c, at, name, c.head_size) for name in ("q_norm", "k_norm"))
    return standard_attention(c, b, index, qk_norm=norms, gate="q_gate")
