"""How prompts of Aya Vision and Command A Vision take images: in tiles, with a small one of all."""

from typing import ClassVar

from modulm_media import MediaFamily

__all__ = ["AyaVisionFamily"]


class AyaVisionFamily(MediaFamily):
    """All is as the processor says."""

    image_processors: ClassVar = {
        "Cohere2VisionImageProcessor": "modulm_cohere.tiles:Cohere2VisionImageProcessorPil"
    }
