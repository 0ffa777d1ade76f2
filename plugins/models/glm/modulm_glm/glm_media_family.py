"""Media families of GLM-V, whose videos are images separated by timestamps, and of GLM-ASR."""

from __future__ import annotations

from collections.abc import Sequence

from modulm_media import GridFamily, MediaFamily

__all__ = ["GlmAsrFamily", "GlmVFamily"]


class GlmVFamily(GridFamily):
    """GLM-4.1V and later."""

    def features(self, kind: str) -> Sequence[int]:
        return super().features("image")


class GlmAsrFamily(MediaFamily):
    """GLM-ASR: uses the processor's output unchanged."""

    kinds = ("audio",)
