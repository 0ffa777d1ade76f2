"""How much is decoded of a file, and what is said where it is not."""

from __future__ import annotations

import re

from attrs import frozen

__all__ = ["FORMATS", "LIMITS", "Limits", "Undecodable", "said"]

#: Formats of images, by Pillow's names; others are for programs, not for cameras and pages.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


class Undecodable(ValueError):
    """What a file holds is not taken; the message is for whoever sent it."""


@frozen(kw_only=True)
class Limits:
    """What is decoded at most.

    formats: of images, by Pillow's names; None: all that it has. pixels: of an image, and of a
    frame of a video. seconds: of sound. frames: that are taken of a video. room: bytes of those
    frames together; larger ones are made smaller.
    """

    formats: tuple[str, ...] | None = FORMATS
    pixels: int = 64 << 20
    seconds: float = 1800.0
    frames: int = 1024
    room: int = 512 << 20


LIMITS = Limits()


def said(error: BaseException) -> str:
    """What an error says, without addresses of this program's memory."""
    words = " ".join(str(error).split())
    words = re.sub(r"<[^>]*>|\b0x[0-9a-fA-F]+\b", "...", words)
    return words[:150] or type(error).__name__
