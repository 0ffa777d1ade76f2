"""LLaVA-NeXT (2024): the whole image plus tiles, whose rows end with a learned vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from modulm.contracts.media import MediaItem
from modulm.nn import Builder
from modulm_llava.llava import (
    TINY_TOWER,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaKeys,
)
from modulm_towers import Pieces, tiny_text

__all__ = ["LlavaNextConfig", "LlavaNextForConditionalGeneration", "LlavaNextKeys", "unpadded"]


@frozen(kw_only=True)
class LlavaNextKeys(LlavaKeys):
    """image_grid_pinpoints: allowed (height, width) of tiled images."""

    image_grid_pinpoints: list[list[int]] = field(factory=list)


@frozen(eq=False, kw_only=True)
class LlavaNextConfig(LlavaConfig):
    """config.json of LLaVA-NeXT."""

    top_level_type: ClassVar[type | None] = LlavaNextKeys


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    """LLaVA-NeXT (1.6)."""

    config_type = LlavaNextConfig

    def make_encoders(self, config: Any, b: Builder) -> None:
        super().make_encoders(config, b)
        b.parameter("image_newline", self, "newline", (config.hidden_size,))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        embeddings = []
        for item in items:
            picture = yield from self._picture(item)
            embeddings.append(picture)
        return embeddings

    def _picture(self, item: MediaItem) -> Pieces[Tensor]:
        """Encode one image, or one video in families that accept videos."""
        if item.kind == "video":
            return (yield from self.film(self.tensor(item, "pixel_values_videos")[0]))
        size = item.tensors["image_sizes"].reshape(-1).tolist()
        tiles = yield from self.project(self.tensor(item, "pixel_values")[0])
        return self._packed(tiles, size)

    def film(self, frames: Tensor) -> Pieces[Tensor]:
        """Encode a video: [n, channels, height, width] -> [tokens, hidden]."""
        tokens = yield from self.project(frames)
        return tokens.flatten(0, 1)

    def _packed(self, tiles: Tensor, image: list[int]) -> Tensor:
        """tiles: [1 + tiles, patches, hidden]; image: (height, width) of the original."""
        whole = tiles[0]
        if len(tiles) == 1:
            return torch.cat([whole, self.newline[None]])
        vision, points = self.config.vision, self.config.top_level.image_grid_pinpoints
        side = vision.image_size // vision.patch_size
        height, width = select_best_resolution(image, points)
        grid = tiles[1:].view(
            height // vision.image_size, width // vision.image_size, side, side, -1
        )
        flat = grid.transpose(1, 2).flatten(0, 1).flatten(1, 2)
        cropped_grid = self.reduced(unpadded(flat, image), side)
        ends = self.newline.expand(len(cropped_grid), 1, -1)
        return torch.cat([whole, torch.cat([cropped_grid, ends], dim=1).flatten(0, 1)])

    def reduced(self, grid: Tensor, side: int) -> Tensor:
        """Reduce the patches of all tiles [rows, columns, hidden]. side: patches per side of a
        tile.
        """
        return grid

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "model_type": "llava_next",
            "image_token_index": 480,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
            "text_config": tiny_text(),
            "vision_config": dict(TINY_TOWER),
        }


def unpadded(grid: Tensor, image: Sequence[int]) -> Tensor:
    """Remove padding from a grid [rows, columns, hidden] of an image of (height, width)."""
    (height, width), (rows, columns) = image, grid.shape[:2]
    if width / height > columns / rows:
        cut = (rows - int(round(height * (columns / width), 7))) // 2
        return grid[cut : rows - cut]
    cut = (columns - int(round(width * (rows / height), 7))) // 2
    return grid[:, cut : columns - cut]
