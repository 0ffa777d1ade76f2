"""Media families of DeepSeek-VL and DeepSeek-OCR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from attrs import evolve, frozen

from modulm_media import Media, MediaFamily
from modulm_media.values import fingerprint

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm_media.processors import ProcessorFiles

__all__ = [
    "DeepseekOcr2Family",
    "DeepseekOcr2PublishedFamily",
    "DeepseekOcrFamily",
    "DeepseekVL2Family",
    "DeepseekVL2Processor",
    "DeepseekVLFamily",
]

_IMAGES = "transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2"
#: The image processor's settings that files may have.
_SETTINGS = ("size", "tile_size", "min_patches", "max_patches", "image_mean", "image_std")

#: Tokens of a view with at most this many patches, and of a larger one.
_FEW, _MANY = 144, 256


class DeepseekVLFamily(MediaFamily):
    """Uses the processor's output unchanged."""


class DeepseekOcr2Family(MediaFamily):
    """Uses the processor's output, limited to view sizes for which the model has queries."""

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs = super().call(media, options)
        names = ("pixel_values", "pixel_values_local")
        views = [self._tokens(np.asarray(outputs[name])) for name in names if name in outputs]
        if sum(views) + 1 != np.asarray(outputs["input_ids"]).size:
            raise ValueError("size, tile_size: the model has 144 or 256 queries for a view")
        return outputs

    def _tokens(self, pixels: np.ndarray) -> int:
        """The number of tokens. pixels: [views, channels, height, width]."""
        side = -(-pixels.shape[-1] // (self.processor.patch_size * self.processor.downsample_ratio))
        return len(pixels) * (_FEW if side * side <= _FEW else _MANY)


class DeepseekOcr2PublishedFamily(DeepseekOcr2Family):
    """DeepSeek-OCR 2 as published: transformers' processor instead of the code that it names."""

    #: Pixels along a side of a tile.
    tile: int = 768

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written, table = files.settings("image_processor"), files.table("processor_config")
        settings = {name: written[name] for name in _SETTINGS if name in written}
        images = import_module(_IMAGES).DeepseekOcr2ImageProcessorPil(
            **{"tile_size": cls.tile, **settings}
        )
        parts = {"image_processor": images, "tokenizer": files.part("tokenizer")}
        processor = files.from_parts("deepseek_ocr2", "DeepseekOcr2Processor", parts)
        processor.patch_size = int(table.get("patch_size", 16))
        processor.downsample_ratio = int(table.get("downsample_ratio", 4))
        return processor


class DeepseekOcrFamily(DeepseekOcr2PublishedFamily):
    """DeepSeek-OCR as published: each line of tokens ends with a token."""

    tile = 640

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        reader, image = self.processor.image_processor, media.value
        settings = {name: getattr(reader, name) for name in (*_SETTINGS[1:4], "crop_to_patches")}
        settings |= {name: options[name] for name in settings if name in options}
        outputs = dict(reader(images=[image], return_tensors="pt", **options))
        lines = self._side(outputs["pixel_values"])
        count = lines * (lines + 1) + 1
        if outputs.pop("num_local_patches")[0]:
            grid = import_module(_IMAGES).get_optimal_tiled_canvas(
                (image.height, image.width), (settings["tile_size"],) * 2,
                settings["min_patches"], settings["max_patches"],
            )  # fmt: skip
            side = self._side(outputs["pixel_values_local"])
            count += grid[1] * side * (grid[0] * side + 1)
            outputs["tile_columns"] = np.array([grid[0]])
        return {**outputs, "input_ids": [list(self.features(media.kind)) * count]}

    def _side(self, pixels: Any) -> int:
        """Tokens along a side of a view. pixels: [views, channels, height, width]."""
        patches = int(pixels.shape[-1]) // self.processor.patch_size
        return int(-(-patches // self.processor.downsample_ratio))


@frozen(eq=False)
class _Untiled:
    """An image in a prompt with many, which has one tile."""

    image: Any


class DeepseekVL2Processor:
    """Cuts images into tiles, for a tokenizer with the placeholder.

    size: pixels along a side of a tile. grids: (width, height) in pixels. side: tokens along a side
    of a tile.
    """

    #: The most images in a prompt that are cut.
    cut_images = 2

    def __init__(
        self, tokenizer: Any, size: int, grids: Sequence[Sequence[int]], side: int,
        mean: Sequence[float], std: Sequence[float],
    ) -> None:  # fmt: skip
        self.tokenizer, self.size, self.grids, self.side = tokenizer, size, grids, side
        self.mean, self.std = np.float32(mean), np.float32(std)
        self.chat_template = tokenizer.chat_template

    def tiles(self, image: Image, cut: bool) -> tuple[np.ndarray, tuple[int, int]]:
        """([tiles, channels, size, size] float32, the view of all first; (columns, rows))."""
        from PIL import ImageOps

        width, height = self._best(image.size) if cut else (self.size, self.size)
        color = tuple(int(part * 255) for part in self.mean)
        image = image.convert("RGB")
        views = [ImageOps.pad(image, (self.size, self.size), color=color)]
        whole = ImageOps.pad(image, (width, height), color=color)
        views += [
            whole.crop((left, top, left + self.size, top + self.size))
            for top in range(0, height, self.size)
            for left in range(0, width, self.size)
        ]
        pixels = np.stack([np.asarray(view, dtype=np.float32) for view in views]) / 255
        normal = ((pixels - self.mean) / self.std).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(normal), (width // self.size, height // self.size)

    def _best(self, size: tuple[int, int]) -> Sequence[int]:
        """The grid that keeps most of the image's pixels, and then has the least padding."""

        def worth(grid: Sequence[int]) -> tuple[int, int]:
            scale = min(grid[0] / size[0], grid[1] / size[1])
            fitted = int(size[0] * scale) * int(size[1] * scale)
            kept = min(fitted, size[0] * size[1])
            return kept, kept - grid[0] * grid[1]

        return max(self.grids, key=worth)


class DeepseekVL2Family(MediaFamily):
    """DeepSeek-VL2: a view of all and tiles; images of a prompt with many have one tile."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        config, tokenizer = files.table("config"), files.part("tokenizer")
        number = tokenizer.convert_tokens_to_ids("<image>")
        if number is None or number == tokenizer.unk_token_id:
            raise ValueError("its tokenizer has no token <image>")
        vision, projector = config.get("vision_config") or {}, config.get("projector_config") or {}
        grids = config.get("candidate_resolutions") or [[384, 384]]
        patches = int(grids[0][0]) // int(vision.get("patch_size", 14))
        table = files.table("processor_config")
        half = [0.5, 0.5, 0.5]
        return DeepseekVL2Processor(
            tokenizer, int(grids[0][0]), grids,
            -(-patches // int(projector.get("downsample_ratio", 2))),
            table.get("image_mean", half), table.get("image_std", half),
        )  # fmt: skip

    def mark(self, kind: str) -> str:
        return "<image>"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.convert_tokens_to_ids("<image>")),)

    def group_media(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        if len(media) <= self.processor.cut_images:
            return tokens, media
        return tokens, [
            evolve(
                one,
                value=None if one.value is None else cast(Any, _Untiled(one.value)),
                hash=fingerprint(one.hash, "one tile"),
            )
            for one in media
        ]

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise ValueError(f"{next(iter(options))}: this model's processor takes no options")
        value: Any = media.value
        whole = isinstance(value, _Untiled)
        pixels, grid = self.processor.tiles(value.image if whole else value, not whole)
        side = self.processor.side
        count = side * (side + 1) + 1 + grid[1] * side * (grid[0] * side + 1)
        ids = [list(self.features(media.kind)) * count]
        return {"pixel_values": pixels, "tile_grid": np.array([grid]), "input_ids": ids}
