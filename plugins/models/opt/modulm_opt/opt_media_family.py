"""Media family of BLIP-2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modulm_media import Media, MediaFamily

__all__ = ["Blip2Family"]


class Blip2Family(MediaFamily):
    """BLIP-2: an image is as many tokens as there are queries.

    Images of a prompt without placeholders come first, as with transformers' processor.
    """

    def mark(self, kind: str) -> str:
        return str(self.processor.image_token)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        images = self.processor.image_processor([media.value], return_tensors="np", **options)
        count = int(self.config.get("num_query_tokens", 32))
        return {**images, "input_ids": [list(self.features(media.kind)) * count]}

    def group_media(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        """The prompt and its media; images without any placeholder come first."""
        mark = np.array(self.features("image"), dtype=np.int64)
        if not media or np.isin(tokens, mark).any():
            return tokens, media
        return np.concatenate([*[mark] * len(media), tokens]), media

    def needs_values(self, options: Mapping[str, Any]) -> bool:
        return False
