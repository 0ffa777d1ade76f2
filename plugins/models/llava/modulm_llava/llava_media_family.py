"""Media families of the LLaVA models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm_media.rows import RowsFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["LlavaFamily", "LlavaNextVideoFamily", "LlavaOnevisionFamily", "PreNormFamily"]


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


class PreNormFamily(LlavaOnevisionFamily):
    """Bee and R-4B: LLaVA-OneVision's processor, whatever code the files name. Only images."""

    kinds = ("image",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        parts = {name: files.part(name) for name in ("image_processor", "tokenizer")}
        parts["video_processor"] = None
        processor = files.from_parts("llava_onevision", "LlavaOnevisionProcessor", parts)
        config = files.table("config")
        vision = config.get("vision_config") or {}
        side = int(vision.get("image_size", 384)) // int(vision.get("patch_size", 14))
        processor.num_image_tokens = side * side
        processor.vision_feature_select_strategy = "full"
        processor.vision_aspect_ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
        return processor
