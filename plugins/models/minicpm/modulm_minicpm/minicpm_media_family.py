"""Media family of MiniCPM-V: images and videos in slices, each image preceded by its number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modulm_media import Media, MediaFamily

__all__ = ["MiniCPMVFamily"]


class MiniCPMVFamily(MediaFamily):
    """MiniCPM-V 4.6."""

    kinds = ("image", "video")

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The processor's output without the image number, which `complete_prompt` writes."""
        if "use_image_id" in options:
            raise ValueError("use_image_id: the checkpoint says whether images have numbers")
        return super().call(media, {**options, "use_image_id": False})

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        if not self.processor.default_use_image_id:
            return tokens
        tokenizer = self.processor.tokenizer
        opens, closes = tokenizer.image_id_start_token, tokenizer.image_id_end_token
        # Filled placeholders begin or continue with one of these tokens.
        image_start = tokenizer.convert_tokens_to_ids(tokenizer.image_start_token)
        inside = {
            image_start,
            tokenizer.convert_tokens_to_ids(tokenizer.slice_start_token),
            int(mark[0]),
        }
        closed = tokenizer.convert_tokens_to_ids(closes)
        pieces, last, count = [], 0, 0
        for at in np.flatnonzero(tokens == mark[0]).tolist():
            before = int(tokens[at - 1]) if at else -1
            if before not in inside | {closed}:
                number = tokenizer.encode(f"{opens}{count}{closes}", add_special_tokens=False)
                pieces += [tokens[last:at], np.array(number, dtype=np.int64)]
                last = at
            count += before not in inside - {image_start}
        return np.concatenate([*pieces, tokens[last:]])
