"""Tiles of Phi-3 vision: an image in whole tiles, with white lines above and below it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

__all__ = ["PaddedTiles"]

#: CLIP's.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@frozen
class PaddedTiles:
    """Cuts images into tiles. tokenizer: the checkpoint's. side: pixels of a tile's side. most:
    tiles at most.
    """

    tokenizer: Any
    side: int
    most: int
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD

    def __call__(self, image: Picture) -> dict[str, Any]:
        """pixel_values: [1 + tiles, 3, side, side], the whole image first. image_sizes: [2], height
        and width of the tiled image.
        """
        import torch
        import torch.nn.functional as F

        bytes_ = np.array(self._fitted(image.convert("RGB")))
        mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (self.mean, self.std))
        pixels = (torch.from_numpy(bytes_).permute(2, 0, 1).float() / 255 - mean) / std
        rows, columns = (size // self.side for size in pixels.shape[1:])
        cut = pixels.reshape(3, rows, self.side, columns, self.side).permute(1, 3, 0, 2, 4)
        whole = F.interpolate(pixels[None], (self.side, self.side), mode="bicubic")
        tiles = torch.cat([whole, cut.reshape(-1, 3, self.side, self.side)])
        return {"pixel_values": tiles, "image_sizes": np.array(pixels.shape[1:])}

    def _fitted(self, image: Picture) -> Picture:
        """The image in as many tiles as are allowed, lying, with its ratio of sides."""
        from PIL import Image

        standing = image.width < image.height
        if standing:
            image = image.transpose(Image.Transpose.ROTATE_90)
        ratio = image.width / image.height
        columns = 1
        while (columns + 1) * math.ceil((columns + 1) / ratio) <= self.most:
            columns += 1
        width = columns * self.side
        image = image.resize((width, int(width / ratio)), Image.Resampling.BILINEAR)
        height = math.ceil(image.height / self.side) * self.side
        white = Image.new("RGB", (width, height), (255, 255, 255))
        white.paste(image, (0, (height - image.height) // 2))
        return white.transpose(Image.Transpose.ROTATE_270) if standing else white
