"""Media families of DeepSeek-VL and DeepSeek-OCR 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modulm_media import Media, MediaFamily

__all__ = ["DeepseekOcr2Family", "DeepseekVLFamily"]

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
