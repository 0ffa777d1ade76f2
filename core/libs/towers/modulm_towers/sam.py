"""SAM's encoder (arXiv 2304.02643) with a convolutional 16x token compressor (arXiv 2510.18234).

Most layers attend within windows and a few globally, with relative positions along both axes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm_layers import PlainMLP, size
from modulm_towers.blocks import patches
from modulm_towers.convolution import Convolution
from modulm_towers.pieces import Pieces, Tower

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["SamConfig", "SamTower"]

_NECK_EPS = 1e-6
#: Upper bound of scores computed at once, unless one head alone has more.
_SCORES = 2**25


@frozen(kw_only=True)
class SamConfig:
    """`sam_config`. window_size: side of a window in patches, for layers not in
    `global_attn_indexes`.
    """

    hidden_size: int = size(768)
    output_channels: int = size(256)
    num_hidden_layers: int = size(12)
    num_attention_heads: int = size(12)
    num_channels: int = size(3)
    image_size: int = size(1024)
    patch_size: int = size(16)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    use_abs_pos: bool = True
    use_rel_pos: bool = True
    window_size: int = size(14, least=0)
    global_attn_indexes: tuple[int, ...] = (2, 5, 8, 11)
    mlp_dim: int = size(3072)
    downsample_channels: tuple[int, int] = (512, 896)

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")

    @property
    def side(self) -> int:
        """Patches along an image of the training size."""
        return self.image_size // self.patch_size


class SamTower(Tower):
    """Square images of one size."""

    positions: Tensor

    def __init__(self, c: SamConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        pixels = c.num_channels * c.patch_size**2
        at = b.at("patch_embed")
        self.patch = at.linear("projection", pixels, c.hidden_size, bias=True, split=False)
        if c.use_abs_pos:
            b.parameter("pos_embed", self, "positions", (1, c.side, c.side, c.hidden_size))
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(_Layer(c, b.at(f"layers.{i}"), i) for i in layers)
        self.reduced = _Reduced(c, b)

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, channels, height, width] -> [n, tokens, last of `downsample_channels`]."""
        side = pixels.shape[-1] // self.config.patch_size
        cut = patches(pixels.to(self.dtype), self.config.patch_size)
        x = self.patch(cut.flatten(0, 1)).view(len(pixels), side, side, -1)
        if self.config.use_abs_pos:
            x = x + self._stretched(side)
        for layer in self.layers:
            x = layer(x)
            yield len(cut) * cut.shape[1]
        out: Tensor = self.reduced(x)
        return out

    def _stretched(self, side: int) -> Tensor:
        """[1, side, side, hidden]: the learned positions, resized."""
        if self.positions.shape[1] == side:
            return self.positions
        table = self.positions.float().permute(0, 3, 1, 2)
        resized = F.interpolate(table, (side, side), mode="bicubic", antialias=True)
        return resized.permute(0, 2, 3, 1).to(self.dtype)


class _Reduced(Module):
    """Four convolutions; each of the last two halves both sides."""

    def __init__(self, c: SamConfig, b: Builder) -> None:
        super().__init__()
        neck, proj, out, (one, two) = (
            b.at("neck"),
            b.at("proj"),
            c.output_channels,
            c.downsample_channels,
        )
        self.convs = ModuleList(
            (
                Convolution(neck, "conv1", c.hidden_size, out, (1, 1), bias=False),
                Convolution(neck, "conv2", out, out, (3, 3), padding=1, bias=False),
                Convolution(proj, "conv1", out, one, (3, 3), stride=2, padding=1, bias=False),
                Convolution(proj, "conv2", one, two, (3, 3), stride=2, padding=1, bias=False),
            )
        )
        norms = ("layer_norm1", "layer_norm2")
        self.norms = ModuleList(neck.layer_norm(name, out, _NECK_EPS) for name in norms)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, rows, columns, hidden] -> [n, tokens, channels]."""
        x = x.permute(0, 3, 1, 2)
        for index, conv in enumerate(self.convs):
            x = conv(x)
            if index < len(self.norms):
                rows = x.permute(0, 2, 3, 1)
                normed = self.norms[index](rows.flatten(0, 2)).view(rows.shape)
                x = normed.permute(0, 3, 1, 2)
        return x.flatten(2).transpose(1, 2)


class _Layer(Module):
    """norm, attention, norm, feed-forward; windows at the lower and right edges are padded."""

    def __init__(self, c: SamConfig, b: Builder, index: int) -> None:
        super().__init__()
        hidden = c.hidden_size
        self.window = 0 if index in c.global_attn_indexes else c.window_size
        self.norm1 = b.layer_norm("layer_norm1", hidden, c.layer_norm_eps)
        self.attn = _Attention(c, b.at("attn"), self.window or c.side)
        self.norm2 = b.layer_norm("layer_norm2", hidden, c.layer_norm_eps)
        self.mlp = PlainMLP(b.at("mlp"), hidden, c.mlp_dim, c.hidden_act, up="lin1", down="lin2")

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, rows, columns, hidden] -> the same."""
        seen = self.norm1(x.flatten(0, 2)).view(x.shape)
        seen = self._in_windows(seen) if self.window else self.attn(seen)
        x = x + seen
        out: Tensor = x + self.mlp(self.norm2(x.flatten(0, 2))).view(x.shape)
        return out

    def _in_windows(self, x: Tensor) -> Tensor:
        n, rows, columns, hidden = x.shape
        side = self.window
        high, wide = -(-rows // side), -(-columns // side)
        x = F.pad(x, (0, 0, 0, wide * side - columns, 0, high * side - rows))
        cut = x.view(n, high, side, wide, side, hidden).transpose(2, 3).flatten(0, 2)
        seen: Tensor = self.attn(cut).view(n, high, wide, side, side, hidden).transpose(2, 3)
        return seen.reshape(n, high * side, wide * side, hidden)[:, :rows, :columns]


class _Attention(Module):
    """Attention among the patches of an image or window.

    Scores include a term for query and distance along each axis.
    """

    distances_h: Tensor
    distances_w: Tensor

    def __init__(self, c: SamConfig, b: Builder, side: int) -> None:
        super().__init__()
        hidden = c.hidden_size
        self.head_dim = hidden // c.num_attention_heads
        self.heads = b.shared.mesh.tensor.part(
            c.num_attention_heads, f"attention heads of {b.prefix}"
        )
        parts = {"q": hidden, "k": hidden, "v": hidden}
        self.qkv = b.linear("qkv", hidden, parts, bias=c.qkv_bias)
        self.out = b.row_linear("proj", hidden, hidden, bias=True)
        self.relative = c.use_rel_pos
        for axis in "hw" if c.use_rel_pos else "":
            shape = (2 * side - 1, self.head_dim)
            b.parameter(f"rel_pos_{axis}", self, f"distances_{axis}", shape)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, rows, columns, hidden] -> the same."""
        n, rows, columns, hidden = x.shape
        qkv = self.qkv(x.reshape(-1, hidden)).view(n, rows * columns, 3, self.heads, -1)
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in qkv.unbind(2))
        step = max(1, _SCORES // (rows * columns) ** 2)
        pieces = zip(q.split(step), k.split(step), v.split(step), strict=True)
        seen = [self._attend(*piece, rows, columns) for piece in pieces]
        joined = torch.cat(seen).view(n, self.heads, rows * columns, -1).transpose(1, 2)
        out: Tensor = self.out(joined.reshape(n * rows * columns, -1))
        return out.view(n, rows, columns, hidden)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int) -> Tensor:
        """q, k, v: [heads of images, patches, head_dim] -> as q."""
        added = None
        if self.relative:
            placed = q.view(len(q), rows, columns, -1)
            down = torch.einsum("nhwc,hkc->nhwk", placed, _between(self.distances_h, rows))
            along = torch.einsum("nhwc,wkc->nhwk", placed, _between(self.distances_w, columns))
            added = (down[..., None] + along[:, :, :, None]).flatten(3).flatten(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added)


def _between(table: Tensor, count: int) -> Tensor:
    """table: [distances, head_dim] -> [count, count, head_dim], between all pairs of positions."""
    if len(table) != 2 * count - 1:
        line = table.float().T[None]
        table = F.interpolate(line, 2 * count - 1, mode="linear")[0].T.to(table.dtype)
    positions = torch.arange(count, device=table.device)
    return table[positions[:, None] - positions + count - 1]
