"""CSM's depth decoder: the codes of one frame, one after the other."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.nn import Builder
from modulm.nn.embedding import Embedding
from modulm_layers import DecoderConfig, GatedMLP, size
from modulm_speakers.model import Choose

__all__ = ["DepthConfig", "DepthDecoder"]

#: Keys and values of the codes so far: [n, codebooks, kv_heads, head_dim] each.
_Cache: TypeAlias = tuple[Tensor, Tensor]


@frozen(kw_only=True)
class DepthConfig(DecoderConfig):
    """`depth_decoder_config`."""

    vocab_size: int = size(2051)
    hidden_size: int = size(1024)
    intermediate_size: int | None = size(8192)
    num_hidden_layers: int = size(4)
    num_attention_heads: int = size(8)
    num_key_value_heads: int | None = size(2)
    max_position_embeddings: int = size(33)
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    backbone_hidden_size: int = size(2048)
    num_codebooks: int = size(32, least=2)


class _Attention(Module):
    """Attention among the codes of a frame."""

    def __init__(self, c: DepthConfig, b: Builder) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_size
        narrow, wide = c.kv_heads * c.head_size, c.heads * c.head_size
        parts = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
        self.qkv = b.linear("qkv_proj", c.hidden_size, parts, bias=c.attention_bias, split=False)
        self.out = b.linear("o_proj", wide, c.hidden_size, bias=c.attention_bias, split=False)
        self.table, self.ops = b.rope(c.rope()), b.ops

    def forward(self, x: Tensor, cache: _Cache, at: int) -> Tensor:
        """x: [n, codes, hidden], the codes from position `at` on -> the same shape."""
        n, count, _ = x.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        qkv = self.qkv(x.flatten(0, 1)).view(n * count, sum(heads), self.head_dim)
        q, k, v = (part.contiguous() for part in qkv.split(heads, dim=1))
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


class _Layer(Module):
    def __init__(self, c: DepthConfig, b: Builder) -> None:
        super().__init__()
        self.norm = b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.attn = _Attention(c, b.at("self_attn"))
        self.mlp_norm = b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(b.at("mlp"), c.hidden_size, c.inner_size, c.hidden_act, bias=c.mlp_bias)

    def forward(self, x: Tensor, cache: _Cache, at: int) -> Tensor:
        x = x + self.attn(self.norm(x), cache, at)
        flat = self.mlp_norm(x).flatten(0, 1)
        out: Tensor = x + self.mlp(flat).view(x.shape)
        return out


class DepthDecoder(Module):
    """Its first input is the backbone's hidden state, then come the codes. table: the embeddings
    of all codes, a codebook after the other.
    """

    heads: Tensor

    def __init__(self, c: DepthConfig, b: Builder, table: Embedding) -> None:
        super().__init__()
        self.config, self.table = c, table
        inner = b.at("model")
        self.project = inner.linear(
            "inputs_embeds_projector", c.backbone_hidden_size, c.hidden_size, split=False
        )
        self.layers = ModuleList(
            _Layer(c, inner.at(f"layers.{index}")) for index in range(c.num_hidden_layers)
        )
        self.norm = inner.rms_norm("norm", c.hidden_size, c.rms_norm_eps)
        shape = (c.num_codebooks - 1, c.hidden_size, c.vocab_size)
        b.parameter("codebooks_head.weight", self, "heads", shape)

    def forward(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        """Choose the codes of frames: [n, hidden], [n] -> [n, codebooks]."""
        c, n = self.config, len(hidden)
        shape = (n, c.num_codebooks, c.kv_heads, c.head_size)
        caches = [(hidden.new_empty(shape), hidden.new_empty(shape)) for _ in self.layers]
        codes, at = [first], 0
        x = torch.stack([hidden, self.table.lookup(first)], 1)
        for codebook in range(1, c.num_codebooks):
            state = self._run(x, caches, at)
            codes.append(choose(state @ self.heads[codebook - 1], codebook))
            at += x.shape[1]
            x = self.table.lookup(codes[-1] + codebook * c.vocab_size)[:, None]
        return torch.stack(codes, 1)

    def _run(self, x: Tensor, caches: list[_Cache], at: int) -> Tensor:
        """[n, codes, backbone hidden] -> the last code's state: [n, hidden]."""
        n, count, _ = x.shape
        x = self.project(x.flatten(0, 1)).view(n, count, -1)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, at)
        state: Tensor = self.norm(x[:, -1].contiguous())
        return state
