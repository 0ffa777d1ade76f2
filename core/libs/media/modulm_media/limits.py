"""Decoding limits, and the error for files that exceed them."""

from __future__ import annotations

import re

from attrs import frozen

__all__ = ["FORMATS", "LIMITS", "Limits", "Undecodable", "error_text"]

#: Image formats, by Pillow's names; formats that only programs exchange are left out.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


class Undecodable(ValueError):
    """A file that cannot or may not be decoded; the message is for the client."""


@frozen(kw_only=True)
class Limits:
    """Limits for decoding.

    formats: image formats by Pillow's names; None allows all. pixels: per image or frame. seconds:
    length of sound. frames: frames taken from a video. room: bytes of those frames together; larger
    frames are scaled down.
    """

    formats: tuple[str, ...] | None = FORMATS
    pixels: int = 64 << 20
    seconds: float = 1800.0
    frames: int = 1024
    room: int = 512 << 20


LIMITS = Limits()


def error_text(error: BaseException) -> str:
    """The message of an error, without memory addresses."""
    text = " ".join(str(error).split())
    text = re.sub(r"<[^>]*>|\b0x[0-9a-fA-F]+\b", "...", text)
    return text[:150] or type(error).__name__
