"""The vision encoder of Phi-4 multimodal (arXiv 2503.01743): SigLIP on padded tiles and a
thumbnail.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm.nn import Builder
from modulm_layers import PlainMLP, size
from modulm_towers import ClipTower, Pieces, Tower, TowerConfig, patches, through

__all__ = ["PhiSight", "PhiSightConfig"]


@frozen(kw_only=True)
class PhiSightConfig(TowerConfig):
    """`vision_config`. crop_size: the side of a tile, in pixels."""

    crop_size: int = size(448)
    image_token_id: int = size(200010, least=0)


class _Tower(ClipTower):
    """Tiles with masked padding patches; positions are relative to the unpadded part."""

    def features(self, pixels: Tensor, filled: Tensor, depth: int) -> Pieces[Tensor]:
        """pixels: [tiles, channels, height, width]; filled: [tiles, rows, columns] bool, on the
        host -> [tiles, rows, columns, hidden] after `depth` layers.
        """
        c = self.config
        cut = patches(pixels.to(self.dtype), c.patch_size).flatten(0, 1)
        positions = _bucket_positions(filled, c.image_size // c.patch_size).to(pixels.device)
        x = self.patch(cut) + self.positions[positions]
        unseen = None if filled.all() else ~filled.flatten().to(x.device)
        lengths = [filled[0].numel()] * len(filled)
        x = yield from through(self.layers[:depth], x, lengths, None, unseen)
        states: Tensor = x.view(*filled.shape, -1)
        return states


def _bucket_positions(filled: Tensor, side: int) -> Tensor:
    """[patches] int64, index of the learned position of each patch of [tiles, rows, columns].

    The relative position within the unpadded part of each side is quantized to the learned grid.
    """
    edges = torch.arange(1 / side, 1.0, 1 / side)

    def steps(counts: Tensor, length: int) -> Tensor:
        parts = torch.arange(length, dtype=torch.float32) * (1.0 / counts)[:, None]
        return torch.bucketize(parts.clamp(max=1.0 - 1e-6), edges, right=True)

    rows = steps(filled[:, :, 0].sum(1), filled.shape[1])
    columns = steps(filled[:, 0, :].sum(1), filled.shape[2])
    return ((rows[:, :, None] * side + columns[:, None]) * filled).flatten()


class PhiSight(Tower):
    """Merges squares of four patches into tokens.

    A learned token ends each row, and another separates the tiles from the thumbnail.
    """

    row_end: Tensor
    between: Tensor

    def __init__(self, c: PhiSightConfig, depth: int, hidden: int, b: Builder) -> None:
        super().__init__()
        self.depth, width = depth, c.hidden_size
        self.tower = _Tower(c, b.at("img_processor"))
        b.parameter("sub_img_feature_extensor", self, "row_end", (1, 1, 1, width))
        b.parameter("global_img_feature_extensor", self, "between", (1, 1, width))
        self.projector = PlainMLP(
            b, width, hidden, "gelu",
            up="img_projection_up", down="img_projection_down", outputs=hidden,
        )  # fmt: skip

    def run(self, pixels: Tensor, filled: Tensor, grid: tuple[int, int]) -> Pieces[Tensor]:
        """Encode an image into [tokens, hidden].

        pixels: [1 + tiles, channels, height, width], the thumbnail first; filled: [1 + tiles, rows,
        columns] bool, on the host; grid: rows and columns of tiles.
        """
        squares = _squares((yield from self.tower.features(pixels, filled, self.depth)))
        whole, tiles = squares[0], _joined(squares[1:], grid)
        inside = _joined(filled[1:, ::2, ::2, None], grid)[:, :, 0]
        height, width = int(inside[:, 0].sum()), int(inside[0].sum())
        rows = (self._rows(tiles[:height, :width]), self.between[0], self._rows(whole))
        out: Tensor = self.projector(torch.cat(rows))
        return out

    def _rows(self, x: Tensor) -> Tensor:
        """[rows, columns, width] -> [tokens, width]."""
        ends = self.row_end[0].expand(len(x), 1, -1)
        return torch.cat([x, ends], dim=1).flatten(0, 1)


def _squares(x: Tensor) -> Tensor:
    """[tiles, side, side, width] -> the means of squares of four; odd sides are padded by
    reflection.
    """
    x = x.permute(0, 3, 1, 2)
    if x.shape[-1] % 2:
        x = F.pad(x, (0, 1, 0, 1), mode="reflect")
    return F.avg_pool2d(x, 2).permute(0, 2, 3, 1)


def _joined(tiles: Tensor, grid: tuple[int, int]) -> Tensor:
    """[tiles, side, side, width] -> [rows * side, columns * side, width]."""
    side, width = tiles.shape[1], tiles.shape[3]
    cut = tiles.reshape(*grid, side, side, width).transpose(1, 2)
    return cut.reshape(grid[0] * side, grid[1] * side, width)
