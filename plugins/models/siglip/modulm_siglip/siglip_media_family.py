"""Media families of CLIP and SigLIP: one image without text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily

__all__ = ["ClipFamily", "NaflexFamily"]


class ClipFamily(MediaFamily):
    """CLIP and SigLIP. An image is a single token, the one that ends a text."""

    def mark(self, kind: str) -> str:
        mark: str = self.processor.tokenizer.eos_token
        return mark

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.eos_token_id),)

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        """The image alone, without the tokens that the tokenizer adds to an empty text."""
        if not np.isin(tokens, self.processor.tokenizer.all_special_ids).all():
            raise RequestError("a prompt is a text or an image, not both", "prompt")
        return mark

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs = self.processor.image_processor(media.value, return_tensors="pt", **options)
        return {**outputs, "input_ids": [list(self.features(media.kind))]}


class NaflexFamily(ClipFamily):
    """SigLIP 2 for images of any size, without padding patches."""

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        shape = np.asarray(outputs["spatial_shapes"])
        patches = np.asarray(outputs["pixel_values"])[0, : int(shape.prod())]
        return {"pixel_values": patches, "spatial_shapes": shape}
