"""The conformer (arXiv 2005.08100) of Granite Speech.

Block attention with relative distances (arXiv 1803.02155); its own transcription logits are fed
back in the middle layer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm_layers import PlainMLP, size
from modulm_towers.convolution import Convolution
from modulm_towers.pieces import Pieces, Tower

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["ConformerConfig", "ConformerTower"]

_EPS = 1e-5


@frozen(kw_only=True)
class ConformerConfig:
    """`encoder_config`. context_size: frames per attention block; output_dim: size of the alphabet
    that the encoder was trained to transcribe. cat_hidden_layers: layers whose outputs precede the
    last one's in its columns; 0 is the input.
    """

    input_dim: int = size(160)
    num_layers: int = size()
    hidden_dim: int = size()
    feedforward_mult: int = size(4)
    num_heads: int = size()
    dim_head: int | None = size(None)
    output_dim: int = size(42)
    context_size: int = size(200)
    max_pos_emb: int = size(512)
    conv_kernel_size: int = size(15)
    conv_expansion_factor: int = size(2)
    cat_hidden_layers: tuple[int, ...] | None = None

    def __attrs_post_init__(self) -> None:
        if any(not 0 <= layer < self.num_layers for layer in self.cat_hidden_layers or ()):
            raise ValueError(f"cat_hidden_layers: {self.cat_hidden_layers}")
        if self.context_size > self.max_pos_emb:
            raise ValueError("context_size: more than max_pos_emb")

    @property
    def head_dim(self) -> int:
        """Dimensions per head."""
        return self.dim_head or self.hidden_dim // self.num_heads


class _Attention(Module):
    """Attention within blocks of frames; scores include a term for query and distance."""

    distances: Tensor

    def __init__(self, c: ConformerConfig, b: Builder) -> None:
        super().__init__()
        inner = c.head_dim * c.num_heads
        self.config = c
        self.norm = b.layer_norm("pre_norm", c.hidden_dim, _EPS)
        self.q = b.linear("to_q", c.hidden_dim, inner, split=False)
        self.kv = b.linear("to_kv", c.hidden_dim, 2 * inner, split=False)
        self.out = b.linear("to_out", inner, c.hidden_dim, bias=True, split=False)
        shape = (2 * c.max_pos_emb + 1, c.head_dim)
        b.parameter("rel_pos_emb.weight", self, "distances", shape)

    def forward(self, x: Tensor) -> Tensor:
        """x: [frames, hidden] of one sound."""
        c = self.config
        x = self.norm(x)
        q, (k, v) = self.q(x), self.kv(x).chunk(2, dim=-1)
        full = len(x) // c.context_size * c.context_size
        blocks = []
        for first, end, length in ((0, full, c.context_size), (full, len(x), len(x) - full)):
            if end > first:
                shape = (-1, length, c.num_heads, c.head_dim)
                heads = [t[first:end].reshape(shape).transpose(1, 2) for t in (q, k, v)]
                blocks.append(self._attend(*heads).transpose(1, 2).flatten(0, 1).flatten(1))
        out: Tensor = self.out(torch.cat(blocks))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[blocks, heads, frames, head_dim] each."""
        positions = torch.arange(q.shape[2], device=q.device)
        distances = positions[:, None] - positions + self.config.max_pos_emb
        scores = torch.einsum("bhcd,crd->bhcr", q, self.distances[distances])
        bias = scores / math.sqrt(q.shape[3])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class _Convolved(Module):
    """Gated depthwise convolution over time with batch norm."""

    mean: Tensor
    var: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, c: ConformerConfig, b: Builder) -> None:
        super().__init__()
        inner, kernel = c.hidden_dim * c.conv_expansion_factor, c.conv_kernel_size
        self.norm = b.layer_norm("norm", c.hidden_dim, _EPS)
        self.up = Convolution(b, "up_conv", c.hidden_dim, 2 * inner, (1,))
        self.depth = Convolution(
            b, "depth_conv.conv", inner, inner, (kernel,), groups=inner, bias=False
        )
        self.sides = (kernel // 2, (kernel - 1) // 2)
        for name in ("running_mean", "running_var", "weight", "bias"):
            attribute = name.removeprefix("running_")
            b.parameter(f"batch_norm.{name}", self, attribute, (inner,))
        self.down = Convolution(b, "down_conv", inner, c.hidden_dim, (1,))

    def forward(self, x: Tensor) -> Tensor:
        """x: [frames, hidden] of one sound."""
        x = F.glu(self.up(self.norm(x).T[None]), dim=1)
        x = self.depth(F.pad(x, self.sides))
        x = F.batch_norm(x, self.mean, self.var, self.weight, self.bias, eps=_EPS)
        out: Tensor = self.down(F.silu(x))[0].T
        return out


class _Block(Module):
    def __init__(self, c: ConformerConfig, b: Builder) -> None:
        super().__init__()
        inner = c.hidden_dim * c.feedforward_mult
        self.norms = ModuleList(
            b.layer_norm(f"{name}.pre_norm", c.hidden_dim, _EPS) for name in ("ff1", "ff2")
        )
        self.feeds = ModuleList(
            PlainMLP(b.at(name), c.hidden_dim, inner, "silu") for name in ("ff1", "ff2")
        )
        self.attention = _Attention(c, b.at("attn"))
        self.convolved = _Convolved(c, b.at("conv"))
        self.norm = b.layer_norm("post_norm", c.hidden_dim, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feeds[0](self.norms[0](x))
        x = x + self.attention(x)
        x = x + self.convolved(x)
        x = x + 0.5 * self.feeds[1](self.norms[1](x))
        out: Tensor = self.norm(x.contiguous())
        return out


class ConformerTower(Tower):
    """Encodes one sound at a time."""

    def __init__(self, c: ConformerConfig, b: Builder) -> None:
        super().__init__()
        self.dtype, hidden = b.shared.dtype, c.hidden_dim
        self.beside = c.cat_hidden_layers or ()
        self.input = b.linear("input_linear", c.input_dim, hidden, bias=True, split=False)
        self.layers = ModuleList(_Block(c, b.at(f"layers.{i}")) for i in range(c.num_layers))
        self.letters = b.linear("out", hidden, c.output_dim, bias=True, split=False)
        self.read = b.linear("out_mid", c.output_dim, hidden, bias=True, split=False)

    def run(self, mel: Tensor) -> Pieces[Tensor]:
        """[frames, bins] -> [frames, hidden * (1 + layers beside the last)]."""
        x: Tensor = self.input(mel.to(self.dtype))
        states = [x] if 0 in self.beside else []
        for count, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if count == len(self.layers) // 2:
                x = x + self.read(self.letters(x).softmax(-1))
            states += [x] if count in self.beside else []
            yield len(x)
        return torch.cat([*states, x], dim=-1) if states else x
