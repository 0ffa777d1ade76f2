"""The blocks of vision encoders: patches lie end to end, images attend to themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.errors import UnsupportedError
from modulm_layers import AttentionNames, GatedMLP, PlainMLP

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["Block", "BlockNames", "BlockShape", "VisionAttention", "attend", "patches"]

_CLIP = AttentionNames("q_proj", "k_proj", "v_proj", "out_proj", "qkv_proj")


@frozen
class BlockNames:
    """How a checkpoint calls the parts of a block, from the block."""

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
    """The shape of a pre-norm block. rms: norms without means; gated: a gated feed-forward part;
    bias, out_bias, mlp_bias: of queries, keys and values, of what follows, of the rest. scales: the
    names of learned factors of the two branches, [hidden] each. qk_norm: RMS norms of all queries
    and all keys of a token, called q_norm and k_norm.
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
    names: BlockNames = field(factory=BlockNames)


class VisionAttention(Module):
    """Attention in which the patches of one image, or of one window of it, see each other."""

    def __init__(self, b: Builder, shape: BlockShape) -> None:
        super().__init__()
        names, hidden = shape.names.projections, shape.hidden
        self.head_dim = shape.head_dim or hidden // shape.heads
        self.heads = b.shared.mesh.tensor.part(shape.heads, b.prefix)
        self.ops, self.neox = b.ops, shape.neox
        whole = shape.heads * self.head_dim
        parts = {names.q: whole, names.k: whole, names.v: whole}
        self.qkv = b.linear(names.qkv, hidden, parts, bias=shape.bias)
        self.out = b.row_linear(names.out, whole, hidden, bias=shape.out_bias)
        if shape.qk_norm and self.heads != shape.heads:
            raise UnsupportedError("norms of whole queries and keys on several ranks: not yet")
        norms = ("q_norm", "k_norm") if shape.qk_norm else ()
        self.norms = ModuleList(b.rms_norm(name, whole, shape.eps) for name in norms)

    def forward(self, x: Tensor, lengths: Sequence[int], turns: Tensor | None) -> Tensor:
        """x: [patches, hidden]; lengths: patches of each image, or window; turns: [patches,
        head_dim], cosines, then sines, of the rotation.
        """
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, self.head_dim).unbind(1)
        if len(self.norms):
            pairs = zip(self.norms, (q, k), strict=True)
            q, k = (norm(t.flatten(1).contiguous()).view(v.shape) for norm, t in pairs)
        if turns is not None:
            q, k = q.contiguous(), k.contiguous()
            places = torch.arange(len(x), device=x.device)
            self.ops.rotary(q, k, places, turns, self.neox)
        out: Tensor = self.out(attend(q, k, v, lengths).flatten(1))
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """[tokens, heads, head_dim] of rows of these lengths, in which all see all."""
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0], *q.shape[1:])
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    found, first = [], 0
    for length in lengths:
        own = slice(first, first + length)
        found.append(attend(q[own], k[own], v[own], [length]))
        first += length
    return torch.cat(found)


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
        for place, name in enumerate(shape.scales or ()):
            b.parameter(name, self, f"scale{place + 1}", (shape.hidden,))
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

    def forward(self, x: Tensor, lengths: Sequence[int], turns: Tensor | None = None) -> Tensor:
        """x: [patches, hidden] -> [patches, hidden]."""
        seen = self.attn(self.norm1(x), lengths, turns)
        x = x + (seen * self.scale1 if self.scaled else seen)
        found = self.mlp(self.norm2(x))
        out: Tensor = x + (found * self.scale2 if self.scaled else found)
        return out


def patches(pixels: Tensor, size: int) -> Tensor:
    """[n, channels, height, width] -> [n, patches, channels * size * size], row by row."""
    n, c, h, w = pixels.shape
    cut = pixels[:, :, : h // size * size, : w // size * size]
    cut = cut.reshape(n, c, h // size, size, w // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, c * size * size)
