"""Media family of Gemma 4: in some models the tokens of an image attend in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import evolve

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed

__all__ = ["Gemma4Family", "Gemma4UnifiedFamily"]


#: The encoder's inputs among the processor's outputs.
_INPUTS = (
    "pixel_values", "image_position_ids", "pixel_values_videos", "video_position_ids",
    "input_features", "input_features_mask",
)  # fmt: skip


class Gemma4Family(MediaFamily):
    """Gemma 4: images, and the frames of videos, each after its time."""

    kinds = ("image", "video")

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        text = config.get("text_config", {})
        self.bidirectional = text.get("use_bidirectional_attention") == "vision"
        self._window = int(text.get("sliding_window", 512))

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        processed = super().process(media, options)
        if media.kind == "audio":
            return evolve(processed, spans=())
        longest = max((end - first for first, end in processed.spans), default=0)
        if longest > self._window:
            raise RequestError(
                f"an image of {longest} tokens: windows are of {self._window}", "multi_modal_data"
            )
        return processed

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        return {name: np.asarray(outputs[name]) for name in _INPUTS if name in outputs}


class Gemma4UnifiedFamily(Gemma4Family):
    """Gemma 4 without encoders: images, videos and sounds."""

    kinds = ("image", "video", "audio")
