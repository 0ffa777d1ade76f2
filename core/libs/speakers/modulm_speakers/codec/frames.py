"""A decoder over the codes of one frame, one code after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.nn import Builder
from modulm_speakers.model import Choose

__all__ = ["FrameAttention", "FrameDecoder", "FrameLayer"]

#: Keys and values of the codes so far: [n, codebooks, kv_heads, head_dim] each.
Cache: TypeAlias = tuple[Tensor, Tensor]


class FrameAttention(Module):
    """Attention among the codes of a frame. c: the settings of a decoder.

    norms: of queries and keys per head, before the rotation.
    """

    def __init__(self, c: Any, b: Builder, norms: tuple[Module, Module] | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_size
        narrow, wide = c.kv_heads * c.head_size, c.heads * c.head_size
        parts = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
        self.qkv = b.linear("qkv_proj", c.hidden_size, parts, bias=c.attention_bias, split=False)
        self.out = b.linear("o_proj", wide, c.hidden_size, bias=c.attention_bias, split=False)
        self.normed = norms is not None
        if norms is not None:
            self.q_norm, self.k_norm = norms
        self.table, self.ops = b.rope(c.rope()), b.ops

    def forward(self, x: Tensor, cache: Cache, at: int) -> Tensor:
        """x: [n, codes, hidden], the codes from position `at` on -> the same shape."""
        n, count, _ = x.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        qkv = self.qkv(x.flatten(0, 1)).view(n * count, sum(heads), self.head_dim)
        q, k, v = (part.contiguous() for part in qkv.split(heads, dim=1))
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        positions = torch.arange(at, at + count, device=x.device).repeat(n)
        self.ops.rotary(q, k, positions, self.table.cos_sin, True)
        end = at + count
        for held, new in zip(cache, (k, v), strict=True):
            held[:, at:end] = new.view(n, count, self.kv_heads, self.head_dim)
        keys, values = (held[:, :end].transpose(1, 2) for held in cache)
        seen = F.scaled_dot_product_attention(
            q.view(n, count, self.heads, self.head_dim).transpose(1, 2), keys, values,
            is_causal=count > 1, enable_gqa=True,
        )  # fmt: skip
        out: Tensor = self.out(seen.transpose(1, 2).reshape(n * count, -1))
        return out.view(n, count, -1)


class FrameLayer(Module):
    """The pre-norm block over the codes of a frame."""

    def __init__(self, norm: Module, attn: FrameAttention, mlp_norm: Module, mlp: Module) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp_norm, self.mlp = norm, attn, mlp_norm, mlp

    def forward(self, x: Tensor, cache: Cache, at: int) -> Tensor:
        """x: [n, codes, hidden] -> the same shape."""
        x = x + self.attn(self.norm(x), cache, at)
        flat = self.mlp_norm(x).flatten(0, 1)
        out: Tensor = x + self.mlp(flat).view(x.shape)
        return out


class FrameDecoder(Module, ABC):
    """Its first input is the state that the first code was sampled from, then come the codes.

    c: its settings. A family sets `layers` and `norm`. codebooks: codes of a frame.
    """

    layers: ModuleList
    norm: Module

    def __init__(self, c: Any, codebooks: int) -> None:
        super().__init__()
        self.cache_shape, self.codebooks = (codebooks, c.kv_heads, c.head_size), codebooks

    @abstractmethod
    def embed(self, codes: Tensor, codebook: int) -> Tensor:
        """Embed codes of a codebook: [n] -> [n, inputs]."""

    @abstractmethod
    def logits(self, state: Tensor, codebook: int) -> Tensor:
        """Compute the logits of a codebook's codes, from the second codebook on."""

    def project(self, x: Tensor) -> Tensor:
        """Bring inputs to the layers' width: [n, inputs] -> [n, hidden]."""
        return x

    def forward(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        """Choose the codes of frames: [n, hidden], [n] -> [n, codebooks]."""
        shape = (len(hidden), *self.cache_shape)
        caches = [(hidden.new_empty(shape), hidden.new_empty(shape)) for _ in self.layers]
        codes, at = [first], 0
        x = torch.stack([hidden, self.embed(first, 0)], 1)
        for codebook in range(1, self.codebooks):
            codes.append(choose(self.logits(self._run(x, caches, at), codebook), codebook))
            at += x.shape[1]
            if codebook + 1 < self.codebooks:
                x = self.embed(codes[-1], codebook)[:, None]
        return torch.stack(codes, 1)

    def _run(self, x: Tensor, caches: list[Cache], at: int) -> Tensor:
        """[n, codes, inputs] -> the last code's state: [n, hidden]."""
        n, count, _ = x.shape
        x = self.project(x.flatten(0, 1)).view(n, count, -1)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, at)
        state: Tensor = self.norm(x[:, -1].contiguous())
        return state
