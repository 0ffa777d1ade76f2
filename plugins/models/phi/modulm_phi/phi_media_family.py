"""Media family of Phi-4 multimodal: images and audio."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import numpy as np

from modulm_media import MediaFamily

__all__ = ["PhiFamily"]


class PhiFamily(MediaFamily):
    """Phi-4 multimodal, whose audio projection depends on whether the prompt has images."""

    kinds = ("image", "audio")
    image_processors: ClassVar = {
        "Phi4MultimodalImageProcessor": "modulm_phi.tiles:Phi4MultimodalImageProcessorPil"
    }

    @property
    def rate(self) -> int:
        """The processor's audio sampling rate in Hz."""
        return int(self.processor.audio_processor.sampling_rate)

    def extra_tensors(self, kind: str, kinds: Collection[str]) -> Mapping[str, np.ndarray]:
        return {"beside_images": np.array("image" in kinds)} if kind == "audio" else {}
