"""How prompts of GLM-V take images and video: frames are images with their times between them."""

from __future__ import annotations

from collections.abc import Sequence

from modulm_media import GridFamily

__all__ = ["GlmVFamily"]


class GlmVFamily(GridFamily):
    """GLM-4.1V and later."""

    def features(self, kind: str) -> Sequence[int]:
        return super().features("image")
