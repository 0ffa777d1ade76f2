"""Media family of Aya Vision and Command A Vision: tiles and a thumbnail per image."""

from typing import ClassVar

from modulm_media import MediaFamily

__all__ = ["AyaVisionFamily"]


class AyaVisionFamily(MediaFamily):
    """Uses the processor's output unchanged."""

    image_processors: ClassVar = {
        "Cohere2VisionImageProcessor": "modulm_cohere.tiles:Cohere2VisionImageProcessorPil"
    }
