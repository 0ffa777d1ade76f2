"""Images as tiles of one size and a thumbnail: Nemotron Nano VL 2 and Llama Nemotron Nano VL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm_media.processors import ProcessorFiles

__all__ = ["TILES", "TileReader", "fullest", "nearest", "open_reader"]

_IMAGE, _START, _END = "<image>", "<img>", "</img>"
#: Tiles of an image at most, without the thumbnail.
TILES = 12
#: CLIP's, which RADIO's encoder takes off.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
#: More tiles than fill this part of an image count no more.
_FULL = 0.6

#: (width, height, side, most tiles) -> (columns, rows)
Choice = Callable[[int, int, int, int], tuple[int, int]]


def nearest(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """The layout of the nearest aspect ratio, as InternVL's."""
    from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got

    columns, rows = got.get_optimal_tiled_canvas((height, width), (side, side), 1, most)
    return columns, rows


def fullest(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """The layout of a near aspect ratio whose tiles have as many pixels as the image."""
    from modulm_media.tiles import shapes

    def fits(layout: np.ndarray) -> float:
        columns, rows = layout.tolist()
        near = (columns / rows) / (width / height)
        return float(min(columns * rows * side**2 / (width * height), _FULL) * min(near, 1 / near))

    columns, rows = max(shapes(most), key=fits).tolist()
    return columns, rows


@frozen
class TileReader:
    """Makes patches and placeholders of an image.

    side: pixels of a tile's side. choose: the layout of tiles. in_bytes: whether resized pixels are
    bytes, as Pillow has them.
    """

    tokenizer: Any
    side: int
    patch: int
    choose: Choice
    most: int = TILES
    thumbnail: bool = True
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD
    in_bytes: bool = False
    image_token: str = _IMAGE

    @property
    def image_token_id(self) -> int:
        """The id of the placeholder."""
        return int(self.tokenizer.convert_tokens_to_ids(_IMAGE))

    def __call__(self, image: Image) -> dict[str, Any]:
        """pixel_values: [patches, channels * patch * patch], tile by tile, row by row.
        image_grid_hw: [tiles, 2]. input_ids: the placeholder's tokens.
        """
        import torch

        from modulm_towers import patches

        image = image.convert("RGB")
        columns, rows = self.choose(*image.size, self.side, self.most)
        whole = self._resized(image, columns, rows)
        cut = whole.reshape(3, rows, self.side, columns, self.side).permute(1, 3, 0, 2, 4)
        tiles = cut.reshape(-1, 3, self.side, self.side)
        if self.thumbnail and len(tiles) > 1:
            tiles = torch.cat([tiles, self._resized(image, 1, 1)[None]])
        mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (self.mean, self.std))
        pixels = patches((tiles / 255 - mean) / std, self.patch)
        count = self.side // self.patch
        tokens = _IMAGE * (len(tiles) * (count // 2) ** 2)
        ids = self.tokenizer([f"{_START}{tokens}{_END}"], add_special_tokens=False)["input_ids"]
        grids = np.full((len(tiles), 2), count)
        return {"pixel_values": pixels.flatten(0, 1), "image_grid_hw": grids, "input_ids": ids}

    def _resized(self, image: Image, columns: int, rows: int) -> Any:
        """[3, height, width] float32 of bytes' range."""
        import torch

        size = (self.side * columns, self.side * rows)
        if self.in_bytes:
            return torch.from_numpy(np.array(image.resize(size))).permute(2, 0, 1).float()
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        resized = torch.nn.functional.interpolate(
            pixels, size[::-1], mode="bicubic", antialias=True, align_corners=False
        )
        return resized[0]


def open_reader(files: ProcessorFiles, choose: Choice, **settings: Any) -> TileReader:
    """Create the reader of published files.

    Raises ValueError for a tokenizer without the tokens of images.
    """
    config, tokenizer = files.table("config"), files.part("tokenizer")
    for token in (_IMAGE, _START, _END):
        number = tokenizer.convert_tokens_to_ids(token)
        if number is None or number == tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {token}")
    vision = config.get("vision_config") or {}
    for key, name in (("norm_mean", "mean"), ("norm_std", "std")):
        if config.get(key) is not None:
            settings[name] = tuple(map(float, config[key]))
    return TileReader(
        tokenizer,
        int(config.get("force_image_size") or 512),
        int(config.get("patch_size") or vision.get("patch_size") or 16),
        choose,
        thumbnail=bool(config.get("use_thumbnail", True)),
        **settings,
    )
