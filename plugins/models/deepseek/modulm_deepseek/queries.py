"""The query encoder of DeepSeek-OCR 2: learned queries that read SAM's patches causally."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.nn import Builder
from modulm_layers import GatedMLP, only, size
from modulm_towers import Pieces, Tower

__all__ = ["QUERIES", "QueryConfig", "QueryEncoder"]

#: Image resolution -> number of queries.
QUERIES = {768: 144, 1024: 256}


@frozen(kw_only=True)
class QueryConfig:
    """`encoder_config`."""

    hidden_size: int = size(896)
    intermediate_size: int = size(4864)
    num_hidden_layers: int = size(24)
    num_attention_heads: int = size(14)
    num_key_value_heads: int = size(2)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = size(None)
    rope_parameters: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        only(self, sliding_window=(None,))
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_key_value_heads: does not divide num_attention_heads")
        kind = self.rope_parameters.get("rope_type", "default")
        if kind != "default":
            raise ValueError(f"rope_parameters: not supported yet: {kind!r}; supported: 'default'")

    @property
    def head_dim(self) -> int:
        """Dimensions of one head."""
        return self.hidden_size // self.num_attention_heads


class QueryEncoder(Tower):
    """Patches attend to each other bidirectionally; a query attends to patches and previous
    queries.
    """

    query_768: Tensor
    query_1024: Tensor

    def __init__(self, c: QueryConfig, b: Builder) -> None:
        super().__init__()
        self.config = c
        for side, count in QUERIES.items():
            shape = (count, c.hidden_size)
            b.parameter(f"query_{side}_resolution.weight", self, f"query_{side}", shape)
        b, layers = b.at("vision_encoder"), range(c.num_hidden_layers)
        self.layers = ModuleList(_Layer(c, b.at(f"layers.{i}")) for i in layers)
        self.norm = b.rms_norm("norm", c.hidden_size, c.rms_norm_eps)

    def run(self, x: Tensor) -> Pieces[Tensor]:
        """x: [n, patches, hidden] -> [n, queries, hidden]."""
        count = x.shape[1]
        queries = self.query_768 if count <= QUERIES[768] else self.query_1024
        x = torch.cat([x, queries.expand(len(x), -1, -1)], dim=1)
        positions = torch.arange(x.shape[1], device=x.device)
        mask = (positions <= positions[:, None]) | (positions < count)
        turns = self._turns(positions)
        for layer in self.layers:
            x = layer(x, turns, mask)
            yield x.shape[0] * x.shape[1]
        read = x[:, count:]
        out: Tensor = self.norm(read.flatten(0, 1)).view(read.shape)
        return out

    def _turns(self, positions: Tensor) -> Tensor:
        """[tokens, head_dim]: cosines, then sines."""
        wide, theta = self.config.head_dim, self.config.rope_parameters.get("rope_theta", 10000.0)
        steps = torch.arange(0, wide, 2, dtype=torch.float32, device=positions.device) / wide
        angles = positions[:, None].float() / float(str(theta)) ** steps
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


class _Layer(Module):
    """The pre-norm block of Qwen 2."""

    def __init__(self, c: QueryConfig, b: Builder) -> None:
        super().__init__()
        self.norm1 = b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.attn = _Attention(c, b.at("self_attn"))
        self.norm2 = b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(b.at("mlp"), c.hidden_size, c.intermediate_size, c.hidden_act)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        """x: [n, tokens, hidden]; turns: [tokens, head_dim]; mask: [queries, keys] bool."""
        flat = x.flatten(0, 1)
        flat = flat + self.attn(self.norm1(flat), turns, mask)
        out: Tensor = flat + self.mlp(self.norm2(flat))
        return out.view(x.shape)


class _Attention(Module):
    def __init__(self, c: QueryConfig, b: Builder) -> None:
        super().__init__()
        group, wide = b.shared.mesh.tensor, c.head_dim
        self.heads = group.part(c.num_attention_heads, f"attention heads of {b.prefix}")
        self.kv_heads = group.part(c.num_key_value_heads, b.prefix)
        keys, queries = c.num_key_value_heads * wide, c.num_attention_heads * wide
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv = b.linear("qkv_proj", c.hidden_size, parts, bias=True)
        self.out = b.row_linear("o_proj", queries, c.hidden_size)
        self.ops, self.head_dim = b.ops, wide

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        """x: [n * tokens, hidden] -> the same."""
        tokens = len(turns)
        heads = [self.heads, self.kv_heads, self.kv_heads]
        parts = self.qkv(x).view(len(x), -1, self.head_dim).split(heads, dim=1)
        q, k, v = (part.contiguous() for part in parts)
        positions = torch.arange(tokens, device=x.device).repeat(len(x) // tokens)
        self.ops.rotary(q, k, positions, turns, True)
        q, k, v = (part.unflatten(0, (-1, tokens)).transpose(1, 2) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        out: Tensor = self.out(seen.transpose(1, 2).reshape(len(x), -1))
        return out
