"""Media families of DeepSeek-VL and DeepSeek-OCR."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm_media import Media, MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = [
    "DeepseekOcr2Family",
    "DeepseekOcr2PublishedFamily",
    "DeepseekOcrFamily",
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
