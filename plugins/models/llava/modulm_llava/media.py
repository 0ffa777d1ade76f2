"""How prompts of LLaVA take images."""

from modulm_media import MediaFamily

__all__ = ["LlavaFamily"]


class LlavaFamily(MediaFamily):
    """All is as the processor says."""
