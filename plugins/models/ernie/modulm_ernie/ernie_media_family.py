"""Media family of PaddleOCR-VL: image positions count time, height and width."""

from __future__ import annotations

from modulm_media import GridFamily

__all__ = ["PaddleOCRFamily"]


class PaddleOCRFamily(GridFamily):
    """PaddleOCR-VL."""

    kinds = ("image",)
