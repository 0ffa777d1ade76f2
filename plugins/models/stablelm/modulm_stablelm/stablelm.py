"""StableLM 3B, 2 1.6B and 2 12B (arXiv 2402.17834): layer norms, a quarter of each head rotated.

12B has parallel branches on one norm, and a norm per head of queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.nn import Builder, Norm
from modulm.nn.weight_slots import Part, Slot, Unit
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    ParallelLayer,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["HeadNorms", "StableLmConfig", "StableLmForCausalLM", "stablelm_layer"]


@frozen(kw_only=True)
class StableLmConfig(DecoderConfig):
    """config.json of StableLM; two keys have other names in the first files (`stablelm_epoch`)."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "norm_eps": "layer_norm_eps",
        "rope_pct": "partial_rotary_factor",
    }

    layer_norm_eps: float = 1e-5
    max_position_embeddings: int = size(4096)
    partial_rotary_factor: float = 0.25
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


class HeadNorms(Norm):
    """Layer norms without bias, one per head, stored as separate tensors."""

    weight: Tensor

    def __init__(self, b: Builder, name: str, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.ops, self.eps = b.ops, eps
        dtype, shard = b.shared.dtype, b.shard(heads, 1)
        empty = torch.empty(shard.size, width, dtype=dtype, device="meta")
        self.weight = torch.nn.Parameter(empty, requires_grad=False)
        stored = partial("{}.norms.{}.weight".format, b.name(name))
        heads_here = range(shard.start, shard.start + shard.size)
        parts = tuple(
            Part(stored(head), (width,), (), (slice(at, at + 1),))
            for at, head in enumerate(heads_here)
        )
        slot = Slot(self, "weight", (shard.size, width), dtype, (parts,))
        b.shared.units.append(Unit(b.name(name), self, [slot]))
        others = tuple(Part(stored(i), (width,)) for i in range(heads) if i not in heads_here)
        if others:
            away = Slot(self, "weight", (heads, width), dtype, (others,))
            b.shared.elsewhere.append(Unit(b.name(name), self, [away]))

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, head_dim]."""
        normed: Tensor = self.ops.layer_norm(x, self.weight, None, self.eps)
        return normed


def _attention(c: StableLmConfig, b: Builder, index: int) -> Attention:
    norms = None
    if c.qk_layernorm:
        at = b.at("self_attn")
        q_norm = HeadNorms(at, "q_layernorm", c.heads, c.head_size, c.layer_norm_eps)
        norms = (q_norm, HeadNorms(at, "k_layernorm", c.kv_heads, c.head_size, c.layer_norm_eps))
    return standard_attention(c, b, index, bias=c.use_qkv_bias, out_bias=False, qk_norm=norms)


def stablelm_layer(c: StableLmConfig, b: Builder, index: int) -> Module:
    """Parallel branches on one norm, or sequential branches."""
    attn, mlp = _attention(c, b, index), standard_mlp(c, b)
    norm = b.layer_norm("input_layernorm", c.hidden_size, c.layer_norm_eps)
    if c.use_parallel_residual:
        return ParallelLayer(norm, attn, mlp)
    second = b.layer_norm("post_attention_layernorm", c.hidden_size, c.layer_norm_eps)
    return PreNormLayer(norm, attn, second, mlp)


class StableLmForCausalLM(DecoderForCausalLM):
    """StableLM with a language-model head."""

    api = 1
    config_type = StableLmConfig
    layer = staticmethod(stablelm_layer)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("norm", config.hidden_size, config.layer_norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "stablelm", "StableLmForCausalLM", qk_layernorm=True, use_parallel_residual=True
        )
