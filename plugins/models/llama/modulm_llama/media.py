"""How prompts of Mistral Small 3 take images: rows of tokens, with one more at each end."""

from modulm_media import MediaFamily

__all__ = ["MistralFamily"]


class MistralFamily(MediaFamily):
    """All is as the processor says."""
