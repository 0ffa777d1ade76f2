"""How prompts of InternVL take images: in tiles, with a small one of all."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from modulm_media import MediaFamily

__all__ = ["InternVLFamily"]


class InternVLFamily(MediaFamily):
    """InternVL, in the format of transformers."""

    def tensors(self, found: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        return {"pixel_values": np.asarray(found["pixel_values"])}
