"""The querying transformer of BLIP-2 (arXiv 2301.12597): learned queries attend to an encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm_layers import PlainMLP, size

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["QFormer", "QFormerConfig"]


@frozen(kw_only=True)
class QFormerConfig:
    """`projector_config`. Every `cross_attention_frequency`-th layer attends to the encoder."""

    hidden_size: int = size(768)
    num_hidden_layers: int = size(12)
    num_attention_heads: int = size(12)
    intermediate_size: int = size(3072)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    cross_attention_frequency: int = size(2)
    encoder_hidden_size: int = size(1408)

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")


class _Attention(Module):
    """Attention with residual addition and norm."""

    def __init__(self, c: QFormerConfig, b: Builder, inputs: int) -> None:
        super().__init__()
        self.heads, hidden = c.num_attention_heads, c.hidden_size
        at = b.at("attention")
        self.q = at.linear("query", hidden, hidden, bias=True, split=False)
        self.k = at.linear("key", inputs, hidden, bias=True, split=False)
        self.v = at.linear("value", inputs, hidden, bias=True, split=False)
        self.out = b.linear("output.dense", hidden, hidden, bias=True, split=False)
        self.norm = b.layer_norm("output.LayerNorm", hidden, c.layer_norm_eps)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """x: [n, queries, hidden]; seen: [n, states, inputs]."""
        parts = (self.q(x), self.k(seen), self.v(seen))
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in parts)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.norm(x + self.out(attended))
        return out


class _Layer(Module):
    def __init__(self, c: QFormerConfig, b: Builder, reads: bool) -> None:
        super().__init__()
        self.attention = _Attention(c, b.at("attention"), c.hidden_size)
        self.reads = reads
        if reads:
            self.cross = _Attention(c, b.at("crossattention"), c.encoder_hidden_size)
        self.mlp = PlainMLP(
            b, c.hidden_size, c.intermediate_size, c.hidden_act,
            up="intermediate_query.dense", down="output_query.dense",
        )  # fmt: skip
        self.norm = b.layer_norm("output_query.LayerNorm", c.hidden_size, c.layer_norm_eps)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        x = self.attention(x, x)
        if self.reads:
            x = self.cross(x, states)
        out: Tensor = self.norm(x + self.mlp(x))
        return out


class QFormer(Module):
    """The layers; the caller owns the queries."""

    def __init__(self, c: QFormerConfig, b: Builder) -> None:
        super().__init__()
        self.norm = b.layer_norm("layernorm", c.hidden_size, c.layer_norm_eps)
        self.layers = ModuleList(
            _Layer(c, b.at(f"encoder.layer.{i}"), i % c.cross_attention_frequency == 0)
            for i in range(c.num_hidden_layers)
        )

    def forward(self, queries: Tensor, states: Tensor) -> Tensor:
        """queries: [count, hidden]; states: [n, states, inputs] -> [n, count, hidden]."""
        x: Tensor = self.norm(queries).expand(len(states), *queries.shape)
        for layer in self.layers:
            x = layer(x, states)
        return x
