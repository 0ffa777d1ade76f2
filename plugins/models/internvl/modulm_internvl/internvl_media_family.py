"""Media family of InternVL: images as tiles with a thumbnail, and video."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modulm_media import MediaFamily

__all__ = ["InternVLFamily"]


class InternVLFamily(MediaFamily):
    """InternVL, in the format of transformers. Video frames are processed like images."""

    kinds = ("image", "video")

    def features(self, kind: str) -> Sequence[int]:
        return super().features("image")

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        return {"pixel_values": np.asarray(outputs["pixel_values"])}
