"""Blocks of vision encoders. Patches are concatenated; each image attends to itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm_layers import AttentionNames, GatedMLP, PlainMLP

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["Block", "BlockNames", "BlockShape", "VisionAttention", "patches"]

_CLIP = AttentionNames("q_proj", "k_proj", "v_proj", "out_proj", "qkv_proj")


@frozen
class BlockNames:
    """Names of a block's parts in a checkpoint, relative to the block."""

    norm1: str = "layer_norm1"
    attn: str = "self_attn"
    projections: AttentionNames = _CLIP
    norm2: str = "layer_norm2"
    mlp: str = "mlp"
    up: str = "fc1"
    down: str = "fc2"
    gate: str = "gate_proj"


@frozen(kw_only=True)
class BlockShape:
    """The shape of a pre-norm block.

    rms: RMS norms instead of layer norms. gated: gated feed-forward. bias, out_bias, mlp_bias:
    biases of queries, keys and values, of the output projection, of the feed-forward block. scales:
    names of learned factors of the two branches, [hidden] each. qk_norm: RMS norms of queries and
    keys, called q_norm and k_norm; over all heads, or over each with head_norm. kv_heads: heads of
    keys and values, 0 for as many as of queries. causal: causal attention. chunk: each token
    attends to all of its own chunk of so many tokens and of those before; 0 for no chunks.
    """

    hidden: int
    inner: int
    heads: int
    act: str
    eps: float = 1e-6
    head_dim: int = 0
    rms: bool = False
    gated: bool = False
    bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    neox: bool = True
    scales: tuple[str, str] | None = None
    qk_norm: bool = False
    head_norm: bool = False
    kv_heads: int = 0
    causal: bool = False
    chunk: int = 0
    names: BlockNames = field(factory=BlockNames)


class VisionAttention(Module):
    """Attention among the patches of one image, or of one window of it."""

    def __init__(self, b: Builder, shape: BlockShape) -> None:
        super().__init__()
        names, hidden = shape.names.projections, shape.hidden
        self.head_dim = shape.head_dim or hidden // shape.heads
        part, kv_heads = b.shared.mesh.tensor.part, shape.kv_heads or shape.heads
        self.heads = part(shape.heads, f"attention heads of {b.prefix}")
        self.kv_heads = part(kv_heads, f"attention heads of {b.prefix}")
        self.ops, self.neox = b.ops, shape.neox
        self.chunk = 1 if shape.causal else shape.chunk
        whole = shape.heads * self.head_dim
        narrow = kv_heads * self.head_dim
        parts = {names.q: whole, names.k: narrow, names.v: narrow}
        self.qkv = b.linear(names.qkv, hidden, parts, bias=shape.bias)
        self.out = b.row_linear(names.out, whole, hidden, bias=shape.out_bias)
        self.head_norm = shape.head_norm
        group, over_all = b.shared.mesh.tensor, shape.qk_norm and not shape.head_norm
        self.group = group if over_all and group.size > 1 else None
        widths = (self.head_dim, self.head_dim) if shape.head_norm else (whole, narrow)
        norms = zip(("q_norm", "k_norm") if shape.qk_norm else (), widths, strict=False)
        self.norms = ModuleList(b.rms_norm(name, width, shape.eps) for name, width in norms)

    def forward(
        self,
        x: Tensor,
        lengths: Sequence[int],
        turns: Tensor | None,
        unseen: Tensor | None = None,
    ) -> Tensor:
        """x: [patches, hidden] -> [patches, hidden].

        lengths: patches per image or window. turns: [patches, head_dim], cosines, then sines, of
        the rotation. unseen: [patches] bool, patches that are masked as keys; requires images of
        one length.
        """
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(x).view(len(x), sum(heads), self.head_dim).split(heads, dim=1)
        if len(self.norms) and self.head_norm:
            q, k = (norm(t.contiguous()) for norm, t in zip(self.norms, (q, k), strict=True))
        elif len(self.norms):
            pairs = zip(self.norms, (q, k), strict=True)
            q, k = (self._normed_whole(norm, t) for norm, t in pairs)
        if turns is not None:
            q, k = q.contiguous(), k.contiguous()
            positions = torch.arange(len(x), device=x.device)
            self.ops.rotary(q, k, positions, turns, self.neox)
        if self.chunk:
            rows = zip(*(t.split(list(lengths)) for t in (q, k, v)), strict=True)
            seen = torch.cat([_chunked(*row, chunk=self.chunk) for row in rows])
        elif unseen is not None:
            seen = _partly(q, k, v, ~unseen.view(len(lengths), -1))
        else:
            seen = self.ops.varlen_attention(q, k, v, lengths)
        out: Tensor = self.out(seen.flatten(1))
        return out

    def _normed_whole(self, norm: Module, x: Tensor) -> Tensor:
        """Norm x [patches, heads, head_dim] over all heads, including those on other ranks."""
        flat = x.flatten(1).contiguous()
        if self.group is None:
            normed: Tensor = norm(flat)
        else:
            whole = norm(self.group.all_gather(flat))
            normed = whole.tensor_split(self.group.size, -1)[self.group.rank].contiguous()
        return normed.view(x.shape)


def _chunked(q: Tensor, k: Tensor, v: Tensor, *, chunk: int) -> Tensor:
    """q, k, v: [tokens, heads, head_dim] of one row -> as q; keys of later chunks are masked."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    if chunk == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    chunks = torch.arange(q.shape[1], device=q.device) // chunk
    visible = chunks[:, None] >= chunks
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(0, 1)


def _partly(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q, k, v: [rows * tokens, heads, head_dim]; visible: [rows, tokens] bool -> as q."""
    q, k, v = (t.view(*visible.shape, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None])
    return attended.transpose(1, 2).flatten(0, 1)


class Block(Module):
    """norm, attention, norm, feed-forward, each branch added to the stream."""

    scale1: Tensor
    scale2: Tensor

    def __init__(self, b: Builder, shape: BlockShape) -> None:
        super().__init__()
        names, norm = shape.names, b.rms_norm if shape.rms else b.layer_norm
        self.norm1 = norm(names.norm1, shape.hidden, shape.eps)
        self.attn = VisionAttention(b.at(names.attn), shape)
        self.norm2 = norm(names.norm2, shape.hidden, shape.eps)
        self.scaled = shape.scales is not None
        for index, name in enumerate(shape.scales or ()):
            b.parameter(name, self, f"scale{index + 1}", (shape.hidden,))
        at = b.at(names.mlp)
        if shape.gated:
            self.mlp: Module = GatedMLP(
                at, shape.hidden, shape.inner, shape.act, bias=shape.mlp_bias,
                gate=names.gate, up=names.up, down=names.down,
            )  # fmt: skip
        else:
            self.mlp = PlainMLP(
                at, shape.hidden, shape.inner, shape.act, bias=shape.mlp_bias,
                up=names.up, down=names.down,
            )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        lengths: Sequence[int],
        turns: Tensor | None = None,
        unseen: Tensor | None = None,
    ) -> Tensor:
        """x: [patches, hidden] -> [patches, hidden]."""
        seen = self.attn(self.norm1(x), lengths, turns, unseen)
        x = x + (seen * self.scale1 if self.scaled else seen)
        transformed = self.mlp(self.norm2(x))
        out: Tensor = x + (transformed * self.scale2 if self.scaled else transformed)
        return out


def patches(pixels: Tensor, size: int) -> Tensor:
    """[n, channels, height, width] -> [n, patches, channels * size * size], row by row."""
    n, c, h, w = pixels.shape
    cut = pixels[:, :, : h // size * size, : w // size * size]
    cut = cut.reshape(n, c, h // size, size, w // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, c * size * size)
