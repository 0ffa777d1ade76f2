"""SigLIP for images of any size (NaViT, arXiv 2307.06304), of Keye-VL and PaddleOCR-VL.

Learned positions are interpolated, and heads are rotated by rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm_layers import size
from modulm_towers.blocks import Block, BlockShape, patches
from modulm_towers.grid import axial_turns, grid_coordinates, lengths_of
from modulm_towers.pieces import Pieces, Tower, through

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["NavitConfig", "NavitTower", "patch_squares"]

Grids = Sequence[Sequence[int]]


@frozen(kw_only=True)
class NavitConfig:
    """`vision_config`."""

    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_channels: int = size(3)
    image_size: int = size(384)
    patch_size: int = size(14)
    spatial_merge_size: int = size(2)
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise ValueError(
                f"num_attention_heads: {self.num_attention_heads} heads of {self.hidden_size} "
                "cannot be rotated"
            )
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def side(self) -> int:
        """The side of the square of learned positions."""
        return self.image_size // self.patch_size


class NavitTower(Tower):
    """Encodes the concatenated patches of all images, row by row."""

    positions: Tensor

    def __init__(self, c: NavitConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, at = c, b.shared.dtype, b.at("embeddings")
        pixels = c.num_channels * c.patch_size**2
        self.patch = at.linear("patch_embedding", pixels, c.hidden_size, bias=True, split=False)
        shape = (c.side**2, c.hidden_size)
        at.parameter("position_embedding.weight", self, "positions", shape)
        block = BlockShape(
            hidden=c.hidden_size, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps,
        )  # fmt: skip
        count = c.num_hidden_layers
        self.layers = ModuleList(Block(b.at(f"encoder.layers.{i}"), block) for i in range(count))
        self.post = b.layer_norm("post_layernorm", c.hidden_size, c.layer_norm_eps)

    def run(self, pixels: Tensor, grids: Grids) -> Pieces[Tensor]:
        """pixels: [patches, values per patch] -> [patches, hidden]. grids: (frames, rows, columns)
        of patches of each image.
        """
        c = self.config
        x = self.patch(pixels.to(self.dtype))
        x = x + torch.cat([self._positions(grid) for grid in grids]).to(x.dtype)
        theta = float(c.rope_parameters.get("rope_theta", 10000.0))
        coordinates = torch.cat([grid_coordinates(grid, 1) for grid in grids])
        turns = axial_turns(coordinates, c.head_dim, theta).to(x.device)
        x = yield from through(self.layers, x, lengths_of(grids), turns)
        out: Tensor = self.post(x)
        return out

    def _positions(self, grid: Sequence[int]) -> Tensor:
        """[patches, hidden]: learned positions, interpolated bilinearly to the grid."""
        frames, rows, columns = grid
        square = self.positions.float().view(1, self.config.side, self.config.side, -1)
        resized = F.interpolate(square.permute(0, 3, 1, 2), (rows, columns), mode="bilinear")
        return resized[0].flatten(1).T.repeat(frames, 1)


def patch_squares(x: Tensor, grid: Sequence[int], merge: int) -> Tensor:
    """[patches, hidden], row by row -> [tokens, merge * merge * hidden]."""
    frames, rows, columns = grid
    cut = patches(x.view(frames, rows, columns, -1).permute(0, 3, 1, 2), merge)
    squares: Tensor = cut.reshape(*cut.shape[:2], x.shape[1], -1).transpose(2, 3)
    return squares.flatten(2).flatten(0, 1)
