"""Media family of GLM-V: the frames of a video are images separated by timestamps."""

from __future__ import annotations

from collections.abc import Sequence

from modulm_media import GridFamily

__all__ = ["GlmVFamily"]


class GlmVFamily(GridFamily):
    """GLM-4.1V and later."""

    def features(self, kind: str) -> Sequence[int]:
        return super().features("image")
