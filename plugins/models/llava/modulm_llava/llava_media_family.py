"""Media families of the LLaVA models."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from modulm_media.rows import RowsFamily

__all__ = ["LlavaFamily", "LlavaNextVideoFamily", "LlavaOnevisionFamily"]


class LlavaFamily(RowsFamily):
    """Uses the processor's output unchanged."""


class LlavaNextVideoFamily(LlavaFamily):
    """Also accepts videos."""

    kinds = ("image", "video")


class LlavaOnevisionFamily(LlavaNextVideoFamily):
    """Every image of a prompt is tiled, even if there are several."""

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        names = ("pixel_values", "image_sizes", "pixel_values_videos")
        return {name: np.asarray(outputs[name]) for name in names if name in outputs}
