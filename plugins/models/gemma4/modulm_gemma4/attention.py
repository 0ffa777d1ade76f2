"""Attention of Gemma 3n and 4: values are normed, some layers share an earlier layer's keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import AttentionBackend
from modulm.contracts.model import Batch
from modulm.nn import Builder, Norm
from modulm_gemma4.config import SharingConfig
from modulm_layers import Attention

__all__ = [
    "BorrowingAttention",
    "SharedKeyValues",
    "OwnAttention",
    "UnitNorm",
    "attention",
    "shared_names",
]


class SharedKeyValues:
    """Keys and values of a step's tokens that later layers reuse, and their cache.

    k, v: [tokens, kv_heads, head_dim].
    """

    def __init__(self, k: Tensor, v: Tensor, cache: int, backend: AttentionBackend) -> None:
        self.k, self.v, self.cache, self.backend = k, v, cache, backend

    def attend(self, q: Tensor, batch: Batch) -> Tensor:
        """q: [tokens, heads, head_dim] -> the same shape. Writes k and v, possibly again."""
        out = q.new_empty(q.shape)
        cache, plan = batch.caches[self.cache], batch.plan(self.cache)
        self.backend.forward(q, self.k, self.v, cache, plan, out)
        return out


class UnitNorm(Norm):
    """An RMS norm without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same shape."""
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale).to(x.dtype)


class OwnAttention(Attention):
    """Attention with norms of queries, keys and values, and a scale of 1."""

    def __init__(self, c: SharingConfig, b: Builder, index: int) -> None:
        kv_heads, width = c.heads_of(index)
        norms = tuple(b.rms_norm(name, width, c.rms_norm_eps) for name in ("q_norm", "k_norm"))
        super().__init__(
            b,
            hidden=c.hidden_size,
            heads=c.heads,
            kv_heads=kv_heads,
            head_dim=width,
            rope=c.rotation(index),
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            scale=1.0,
            window=c.window(index),
            qk_norm=(norms[0], norms[1]),
        )
        self.kind, self.v_norm = c.layer_type(index), UnitNorm(c.rms_norm_eps)

    def forward(self, x: Tensor, batch: Batch, shared: dict[str, SharedKeyValues]) -> Tensor:  # type: ignore[override]
        """x: [tokens, hidden] -> [tokens, hidden]; stores keys and values in `shared`."""
        q, k, v = self._project(self.qkv(x), batch.positions)
        shared[self.kind] = SharedKeyValues(k, self.v_norm(v), self.cache, self.backend)
        attended: Tensor = self.out(shared[self.kind].attend(q, batch).flatten(1))
        return attended


class BorrowingAttention(Module):
    """Attention that reuses the keys and values of the last layer of its kind that computes
    them.
    """

    def __init__(self, c: SharingConfig, b: Builder, index: int) -> None:
        super().__init__()
        width, bias = c.heads_of(index)[1], c.attention_bias
        self.heads = b.shared.mesh.tensor.part(c.heads, f"attention heads of {b.prefix}")
        self.kind, self.ops = c.layer_type(index), b.ops
        self.q = b.linear("q_proj", c.hidden_size, c.heads * width, bias=bias)
        self.q_norm = b.rms_norm("q_norm", width, c.rms_norm_eps)
        self.out = b.row_linear("o_proj", c.heads * width, c.hidden_size, bias=bias)
        self.rotation: Any = b.rope(c.rotation(index))

    def forward(self, x: Tensor, batch: Batch, shared: dict[str, SharedKeyValues]) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        q = self.q_norm(self.q(x).view(x.shape[0], self.heads, -1))
        self.ops.rotary(q, q[:, :0], batch.positions, self.rotation.cos_sin, True)
        attended: Tensor = self.out(shared[self.kind].attend(q, batch).flatten(1))
        return attended


def attention(c: SharingConfig, b: Builder, index: int) -> Module:
    """The attention of layer `index`; `b` points at the layer."""
    kind = OwnAttention if index < c.first_shared else BorrowingAttention
    return kind(c, b.at("self_attn"), index)


def shared_names(c: SharingConfig) -> tuple[str, ...]:
    """Names of key and value weights that files contain for layers that share others'."""
    listed = "|".join(map(str, range(c.first_shared, c.num_hidden_layers))) or "none"
    return (rf"layers\.({listed})\.self_attn\.(k_proj|v_proj|k_norm)\.",)
