"""Media family of Ovis: tiles, separated by tokens that the encoder embeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modulm_media import MediaFamily

__all__ = ["OvisFamily"]


class OvisFamily(MediaFamily):
    """Ovis 2. The encoder gets the placeholder's tokens, because it embeds all of them."""

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.config["image_token_id"]), *self.config["visual_indicator_token_ids"])

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        tokens = np.asarray(outputs["input_ids"][0], dtype=np.int64)
        return {"pixel_values": np.asarray(outputs["pixel_values"]), "tokens": tokens}
