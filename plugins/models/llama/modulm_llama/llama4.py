"""Llama 4 for text (Meta, 2025): chunked attention, some layers without positions, experts.

A layer with positions sees the tokens of its own chunk. Backends only support windows, so if
sequences may exceed a chunk, two extra key dimensions encode whether the chunk is odd, and queries
mask the other parity. A window of one chunk reaches into at most one odd and one even chunk; scores
within the query's own chunk stay exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import AttentionBackend, AttentionSpec
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Rewrite, RMSNorm, WeightNames
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    GatedMLP,
    MoE,
    PreNormLayer,
    Routing,
    size,
    tiny_config,
    transpose,
)

__all__ = [
    "Llama4Attention",
    "Llama4Config",
    "Llama4Experts",
    "Llama4ForCausalLM",
    "Llama4Layer",
]

#: Subtracted from scores of other chunks: exp(-1000) is 0, and fp16 can represent it.
_FAR = 1000.0
_KINDS = {"chunked_attention", "full_attention"}


@frozen(kw_only=True)
class Llama4Config(DecoderConfig):
    """config.json of Llama 4's text model (`text_config` of its own files).

    `no_rope_layers` has a 0 for each layer without positions. With `attn_temperature_tuning`, their
    queries grow with the logarithm of the position.
    """

    ROPE_NEOX = False

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(131072)
    rope_theta: float = 500000.0
    intermediate_size_mlp: int = size(16384)
    num_local_experts: int = size(16)
    num_experts_per_tok: int = size(1)
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: int = size(1)
    no_rope_layers: tuple[int, ...] = ()
    no_rope_layer_interval: int = size(4)
    attention_chunk_size: int | None = size(8192)
    use_qk_norm: bool = True
    attn_temperature_tuning: bool = True
    attn_scale: float = 0.1
    floor_scale: int = size(8192)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.no_rope_layers and len(self.no_rope_layers) < self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers: {len(self.no_rope_layers)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        unknown = set(self.layer_types or ()) - _KINDS
        if unknown:
            raise ValueError(f"layer_types: kinds are {sorted(_KINDS)}, got {sorted(unknown)}")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} of {self.num_local_experts}"
            )

    def rotates(self, index: int) -> bool:
        """Whether layer `index` has rotary positions."""
        if self.no_rope_layers:
            return bool(self.no_rope_layers[index])
        return bool((index + 1) % self.no_rope_layer_interval)

    def chunk(self, index: int) -> int | None:
        """Length of layer `index`'s chunks, None for global layers."""
        kind = self.layer_type(index)
        chunked = kind == "chunked_attention" if kind else self.rotates(index)
        return self.attention_chunk_size if chunked else None

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        if self.moe_layers is not None:
            return index in self.moe_layers
        return (index + 1) % self.interleave_moe_layer_step == 0


@frozen(eq=False)
class _Widened(Builder):
    """A builder whose attention layers store two extra dimensions per key, within `window`."""

    window: int = 0

    def attention_cache(self, spec: AttentionSpec, **more: Any) -> tuple[int, AttentionBackend]:
        if not self.shared.windows:
            raise UnsupportedError(
                f"{self.prefix}: not supported yet: chunked attention without windows. Set "
                f"--max-model-len {self.window} or less."
            )
        size = spec.head_dim
        wide = evolve(spec, head_dim=size + 2, value_dim=size, window=self.window)
        return super().attention_cache(wide, **more)


class Llama4Attention(Attention):
    """Attention within chunks, or with queries that grow with their position."""

    def __init__(self, c: Llama4Config, b: Builder, index: int) -> None:
        rotates, chunk = c.rotates(index), c.chunk(index)
        if chunk is not None and chunk >= b.shared.max_length:
            chunk = None
        norms = (RMSNorm(b.ops, c.rms_norm_eps),) * 2 if rotates and c.use_qk_norm else None
        super().__init__(
            b if chunk is None else _Widened(b.shared, b.prefix, chunk),
            hidden=c.hidden_size,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_size,
            rope=c.rope() if rotates else None,
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            qk_norm=norms,
            norm_last=norms is not None,
        )
        self.chunk = chunk
        self.growth = 0.0 if rotates or not c.attn_temperature_tuning else c.attn_scale
        self.floor, self.far = c.floor_scale, _FAR * c.head_size**0.5
        self.fusable = self.fusable and chunk is None and not self.growth

    def _project(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._project(qkv, positions)
        if self.growth:
            q = (q * self._temperature(positions)).to(q.dtype)
        if self.chunk is None:
            return q, k, v
        odd = positions // self.chunk % 2
        kind = torch.stack([1 - odd, odd], -1).unsqueeze(1).to(q.dtype)
        other = (kind - 1) * self.far
        q, k = (
            torch.cat([x, mark.expand(-1, x.shape[1], -1)], -1)
            for x, mark in ((q, other), (k, kind))
        )
        return q, k, v

    def _temperature(self, positions: Tensor) -> Tensor:
        """[tokens, 1, 1]: 1 up to `floor` tokens, then more (Nakanishi, arXiv 2501.19399)."""
        spans = torch.floor((positions.float() + 1.0) / self.floor)
        return (torch.log1p(spans) * self.growth + 1.0)[:, None, None]


class Llama4Experts(MoE):
    """Experts whose routing weights scale their input, plus a shared expert."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        weights, ids = self.choose(self.router(x))
        tokens, chosen = ids.shape
        each = x.unsqueeze(1) * weights.to(x.dtype).unsqueeze(-1)
        gate_up, down = self.gate_up, self.down
        expert_outputs = self.fused_experts(
            each.flatten(0, 1),
            torch.ones_like(weights).view(-1, 1),
            ids.reshape(-1, 1),
            gate_up.method.experts(gate_up),
            down.method.experts(down),
            **self.gate,
        )
        expert_outputs = self.summed(expert_outputs)
        mixed = expert_outputs if chosen == 1 else expert_outputs.view(tokens, chosen, -1).sum(1)
        both: Tensor = mixed if self.shared is None else self.ops.add(mixed, self.shared(x))
        return both


def _feed_forward(c: Llama4Config, b: Builder, index: int) -> Module:
    if not c.sparse(index):
        return GatedMLP(b, c.hidden_size, c.intermediate_size_mlp, c.hidden_act)
    routing = Routing(c.num_experts_per_tok, scoring="sigmoid", renormalise=False)
    return Llama4Experts(
        b,
        hidden=c.hidden_size,
        inner=c.inner_size,
        experts=c.num_local_experts,
        routing=routing,
        act=c.hidden_act,
        shared=GatedMLP(b.at("shared_expert"), c.hidden_size, c.inner_size, c.hidden_act),
        names=ExpertNames(router="router"),
    )


class Llama4Layer(PreNormLayer):
    """The pre-norm block with experts in some layers."""

    def __init__(self, c: Llama4Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            Llama4Attention(c, b.at("self_attn"), index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            _feed_forward(c, b.at("feed_forward"), index),
        )


class Llama4ForCausalLM(DecoderForCausalLM):
    """Llama 4 (text) with a language-model head; stacks of experts are stored transposed."""

    api = 1
    config_type = Llama4Config
    layer = Llama4Layer
    names = WeightNames(rewrite=(Rewrite(r"experts\.(gate_up|down)_proj$", transpose),))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "llama4_text",
            "Llama4ForCausalLM",
            num_hidden_layers=4,
            head_dim=24,
            intermediate_size=32,
            intermediate_size_mlp=96,
            num_local_experts=6,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 1, 0, 1],
            attention_chunk_size=12,
            floor_scale=8,
            attn_scale=0.3,
        )
