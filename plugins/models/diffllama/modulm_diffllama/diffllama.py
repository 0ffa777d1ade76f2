"""DiffLlama: Llama with differential attention (Ye et al., arXiv 2410.05258).

Heads are paired, and the second head's output is subtracted from the first's. Each attends to the
concatenated values of two heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import PLAIN, AttentionSpec
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder, RMSNorm
from modulm.nn.weight_slots import Unit
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    standard_mlp,
    tiny_config,
)

__all__ = ["DiffLlamaConfig", "DiffLlamaForCausalLM", "DiffLlamaLayer", "DifferentialAttention"]

_WEIGHTS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@frozen(kw_only=True)
class DiffLlamaConfig(DecoderConfig):
    """config.json of DiffLlama."""

    rms_norm_eps: float = 1e-5

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.kv_heads % 2:
            raise ValueError(f"num_key_value_heads: {self.kv_heads} heads cannot be paired")


class DifferentialAttention(Module):
    """softmax(Q1 K1) V - lambda softmax(Q2 K2) V, normed; V has two heads.

    Heads h and h + heads / 2 are a pair, as are their values. `index`: of the layer, which sets the
    initial lambda.
    """

    lambda_q1: Tensor
    lambda_k1: Tensor
    lambda_q2: Tensor
    lambda_k2: Tensor

    def __init__(self, c: DiffLlamaConfig, b: Builder, index: int) -> None:
        super().__init__()
        if b.ranks > 1:
            raise UnsupportedError(
                f"tensor_parallel_size: not supported yet: heads in pairs ({b.prefix})"
            )
        self.heads, self.kv_heads, self.size = c.heads, c.kv_heads, c.head_size
        self.start = 0.8 - 0.6 * math.exp(-0.3 * index)
        self.ops, rope = b.ops, c.rope()
        self.rotation, self.neox = b.rope(rope), rope.neox
        sizes = {"q_proj": c.heads, "k_proj": c.kv_heads, "v_proj": c.kv_heads}
        parts = {name: count * self.size for name, count in sizes.items()}
        self.qkv = b.linear("qkv_proj", c.hidden_size, parts, bias=c.attention_bias)
        width = c.heads * self.size
        self.out = b.row_linear("o_proj", width, c.hidden_size, bias=c.attention_bias)
        self.norm = self.make_norm(c, b)
        for name in _WEIGHTS:
            b.parameter(name, self, name, (self.size,), dtype=torch.float32)
        units = b.shared.units
        slots = [slot for unit in units[-len(_WEIGHTS) :] for slot in unit.slots]
        units[-len(_WEIGHTS) :] = [Unit(b.name("lambda"), self, slots, self._set_weight)]
        spec = AttentionSpec(
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=self.size,
            value_dim=2 * self.size,
            scale=self.size**-0.5,
            dtype=b.dtype,
            kv_dtype=b.shared.kv_dtype,
        )
        self.cache, self.backend = b.attention_cache(spec)
        #: Lambda: the weight of the head that is subtracted.
        self.weight = self.start

    def make_norm(self, c: DiffLlamaConfig, b: Builder) -> Module:
        """Make the norm of a pair's output: [tokens, pairs, 2 head_dim]."""
        return RMSNorm(b.ops, c.rms_norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values [tokens, heads, head_dim], pairs half the heads apart.

        x: [tokens, hidden].
        """
        qkv = self.qkv(x).view(x.shape[0], -1, self.size)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        tokens, (q, k, v) = x.shape[0], self.project(x)
        q, k = q.contiguous(), k.contiguous()
        self.ops.rotary(q, k, batch.positions, self.rotation.cos_sin, self.neox)
        pairs = torch.cat(v.chunk(2, dim=1), dim=-1).repeat(1, 2, 1)
        out = q.new_empty(tokens, self.heads, 2 * self.size)
        plan = batch.plan(self.cache)
        self.backend.forward(q, k, pairs, batch.caches[self.cache], plan, out, PLAIN)
        first, second = out.chunk(2, dim=1)
        difference = self.norm(first - self.weight * second)
        attended: Tensor = self.out((1 - self.start) * difference.flatten(1))
        return attended

    def _set_weight(self) -> None:
        grown, shrunk = self.lambda_q1 @ self.lambda_k1, self.lambda_q2 @ self.lambda_k2
        self.weight = float(grown.exp() - shrunk.exp()) + self.start


class DiffLlamaLayer(PreNormLayer):
    """The pre-norm block with differential attention."""

    def __init__(self, c: DiffLlamaConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            DifferentialAttention(c, b.at("self_attn"), index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class DiffLlamaForCausalLM(DecoderForCausalLM):
    """DiffLlama with a language-model head."""

    api = 1
    config_type = DiffLlamaConfig
    layer = DiffLlamaLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("diffllama", "DiffLlamaForCausalLM")
