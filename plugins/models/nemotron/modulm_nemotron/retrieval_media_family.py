"""Media family of Llama Nemotron embed and rerank VL: tiles of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from modulm_media import Media, MediaFamily

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm_media.processors import ProcessorFiles

__all__ = ["EmbedVLFamily", "TileProcessor"]

#: The token whose embedding is replaced, and SigLIP's mean and deviation.
_TOKEN, _HALF = "<IMG_CONTEXT>", (0.5, 0.5, 0.5)


@frozen(eq=False, kw_only=True)
class TileProcessor:
    """Cuts images into tiles, for a tokenizer with the placeholders.

    side, patch: pixels along a tile and a patch. least, most: tiles, beside the
    thumbnail.
    """

    tokenizer: Any
    side: int
    patch: int
    least: int
    most: int
    thumbnail: bool
    mean: Sequence[float]
    std: Sequence[float]

    @property
    def chat_template(self) -> Any:
        """The tokenizer's."""
        return self.tokenizer.chat_template

    def tiles(self, image: Image, most: int) -> np.ndarray:
        """[tiles, side, side, 3] float32, normalized; the thumbnail last."""
        image, side = image.convert("RGB"), self.side
        columns, rows = self._grid(image.size, most)
        whole = self.resized(image, (columns * side, rows * side))
        cut = whole.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
        views = cut.reshape(-1, side, side, 3)
        if self.thumbnail and len(views) > 1:
            views = np.concatenate([views, self.resized(image, (side, side))[None]])
        return (views / 255 - np.float32(self.mean)) / np.float32(self.std)

    def _grid(self, size: tuple[int, int], most: int) -> tuple[int, int]:
        """(columns, rows) of tiles for an image of that width and height."""
        grids = sorted(
            {
                (columns, rows)
                for columns in range(1, most + 1)
                for rows in range(1, most + 1)
                if self.least <= columns * rows <= most
            },
            key=lambda grid: (grid[0] * grid[1], grid),
        )
        shape, area = size[0] / size[1], size[0] * size[1]

        def worth(grid: tuple[int, int]) -> float:
            filled = min(grid[0] * grid[1] * self.side**2 / area, 0.6)
            own = grid[0] / grid[1]
            return filled * min(own / shape, shape / own)

        return max(grids, key=worth)

    @staticmethod
    def resized(image: Image, size: tuple[int, int]) -> np.ndarray:
        """[height, width, 3] float32 from 0 to 255. size: (width, height)."""
        return np.asarray(image.resize(size, resample=3), dtype=np.float32)


class EmbedVLFamily(MediaFamily):
    """Tiles between `<img>` and `</img>`."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        config, tokenizer = files.table("config"), files.part("tokenizer")
        for token in (_TOKEN, "<img>", "</img>"):
            number = tokenizer.convert_tokens_to_ids(token)
            if number is None or number == tokenizer.unk_token_id:
                raise ValueError(f"its tokenizer has no token {token}")
        vision = config.get("vision_config") or {}
        written = {**files.table("preprocessor_config"), **files.table("processor_config")}
        least = written.get("min_input_tiles", config.get("min_dynamic_patch", 1))
        most = written.get("max_input_tiles", config.get("max_dynamic_patch", 1))
        if not written.get("dynamic_image_size", config.get("dynamic_image_size", True)):
            least = most = 1
        side = config.get("force_image_size") or written.get("image_size") or 512
        return TileProcessor(
            tokenizer=tokenizer, side=int(side),
            patch=int(config.get("patch_size") or vision.get("patch_size", 16)),
            least=int(least), most=int(most),
            thumbnail=bool(written.get("use_thumbnail", config.get("use_thumbnail", True))),
            mean=config.get("norm_mean") or _HALF, std=config.get("norm_std") or _HALF,
        )  # fmt: skip

    def mark(self, kind: str) -> str:
        return "<image>"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.convert_tokens_to_ids(_TOKEN)),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        most = int(options.get("max_num_tiles", self.processor.most))
        if unknown := [name for name in options if name != "max_num_tiles"]:
            raise ValueError(f"{unknown[0]}: this model's processor has no such option")
        tiles = self.processor.tiles(media.value, most).transpose(0, 3, 1, 2)
        side = self.processor.side // self.processor.patch
        ratio = float(self.config.get("downsample_ratio", 0.5))
        text = f"<img>{_TOKEN * (len(tiles) * int(side * side * ratio * ratio))}</img>"
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        pixels = np.ascontiguousarray(tiles, dtype=np.float32)
        return {"pixel_values": pixels, "input_ids": [ids]}
