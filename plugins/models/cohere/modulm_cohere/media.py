"""How prompts of Aya Vision and Command A Vision take images: in tiles, with a small one of all."""

from modulm_media import MediaFamily

__all__ = ["AyaVisionFamily"]


class AyaVisionFamily(MediaFamily):
    """All is as the processor says."""
