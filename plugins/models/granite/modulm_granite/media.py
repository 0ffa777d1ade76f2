"""How prompts of Granite Speech take sound."""

from modulm_media import MediaFamily

__all__ = ["SpeechFamily"]


class SpeechFamily(MediaFamily):
    """All is as the processor says."""

    kinds = ("audio",)
