"""Media family of LFM2-VL."""

from __future__ import annotations

from modulm_media import MediaFamily

__all__ = ["Lfm2VlFamily"]


class Lfm2VlFamily(MediaFamily):
    """Uses the processor's output unchanged."""
