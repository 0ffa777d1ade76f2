"""SigLIP 2's encoder of images with native aspect ratios (NaFlex, arXiv 2502.14786)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm_layers import size
from modulm_towers.blocks import Block, BlockShape
from modulm_towers.pieces import Pieces, Tower

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["NaflexTower", "Siglip2VisionConfig"]


@frozen(kw_only=True)
class Siglip2VisionConfig:
    """`vision_config` of SigLIP 2. num_patches: of the square of learned positions."""

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_channels: int = size(3)
    patch_size: int = size(16)
    num_patches: int = size(256)
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if round(self.num_patches**0.5) ** 2 != self.num_patches:
            raise ValueError(f"num_patches: {self.num_patches} is not a square")


class NaflexTower(Tower):
    """Encodes the concatenated patches of all images, with interpolated positions.

    inner: leave out the last layer and the last norm.
    """

    positions: Tensor

    def __init__(self, c: Siglip2VisionConfig, b: Builder, inner: bool = False) -> None:
        super().__init__()
        self.config, hidden, at = c, c.hidden_size, b.at("embeddings")
        pixels = c.num_channels * c.patch_size**2
        self.patch = at.linear("patch_embedding", pixels, hidden, bias=True, split=False)
        shape = (c.num_patches, hidden)
        at.parameter("position_embedding.weight", self, "positions", shape)
        block = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps,
        )  # fmt: skip
        layers = range(c.num_hidden_layers - inner)
        self.layers = ModuleList(Block(b.at(f"encoder.layers.{i}"), block) for i in layers)
        self.post = None if inner else b.layer_norm("post_layernorm", hidden, c.layer_norm_eps)

    def run(self, pixels: Tensor, grids: Sequence[Sequence[int]]) -> Pieces[Tensor]:
        """pixels: [patches, values per patch], row by row of images of (rows, columns) -> [patches,
        hidden].
        """
        positions = {(rows, columns): self._stretched(rows, columns) for rows, columns in grids}
        x = self.patch(pixels) + torch.cat([positions[rows, columns] for rows, columns in grids])
        lengths = [rows * columns for rows, columns in grids]
        for layer in self.layers:
            x = layer(x, lengths)
            yield len(x)
        out: Tensor = x if self.post is None else self.post(x)
        return out

    def _stretched(self, rows: int, columns: int) -> Tensor:
        """Interpolate the positions: [rows * columns, hidden]."""
        side = round(self.config.num_patches**0.5)
        table = self.positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(
            table, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True
        )
        return resized[0].flatten(1).T.to(self.positions.dtype)
