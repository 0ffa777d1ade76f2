"""Media family of Aya Vision and Command A Vision: tiles and a thumbnail per image."""

from modulm_media import MediaFamily

__all__ = ["AyaVisionFamily"]


class AyaVisionFamily(MediaFamily):
    """Uses the processor's output unchanged."""
