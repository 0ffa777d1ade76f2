"""Media family of Gemma 4: in some models the tokens of an image attend in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed

__all__ = ["Gemma4Family"]


class Gemma4Family(MediaFamily):
    """Gemma 4."""

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        text = config.get("text_config", {})
        self.bidirectional = text.get("use_bidirectional_attention") == "vision"
        self._window = int(text.get("sliding_window", 512))

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        processed = super().process(media, options)
        longest = max((end - first for first, end in processed.spans), default=0)
        if longest > self._window:
            raise RequestError(
                f"an image of {longest} tokens: windows are of {self._window}", "multi_modal_data"
            )
        return processed

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        return {name: np.asarray(outputs[name]) for name in ("pixel_values", "image_position_ids")}
