"""Decode image, audio and video files from bytes.

The format is detected from the content, whatever the file's name or type say. Untrusted files are
decoded in separate processes (`modulm_media.workers`).
"""

from __future__ import annotations

import io as streams
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from modulm_media.limits import LIMITS, Limits, Undecodable, error_text
from modulm_media.sound_files import decode_sound
from modulm_media.values import Sound, Video
from modulm_media.video_files import decode_video

__all__ = ["decode", "decode_image", "rgb"]


def decode(
    kind: str,
    data: bytes,
    io: Mapping[str, Any],
    limits: Limits = LIMITS,
    announce: Callable[[int], None] = lambda size: None,
) -> Image.Image | Sound | Video:
    """Decode a file.

    io: the options of `--media-io-kwargs` for its kind, and `rate`, the target sample rate of
    sound. announce: called with the decoded size in bytes, as the file's headers tell it, before
    any pixel or sample is decoded; for sound again if it is longer than that. Raises Undecodable,
    and what `announce` raises.
    """
    if not data:
        raise Undecodable("it is empty")
    if kind == "image":
        return decode_image(data, io, limits, announce)
    if kind == "audio":
        return decode_sound(data, io, limits, announce)
    return decode_video(data, io, limits, announce)


def decode_image(
    data: bytes,
    io: Mapping[str, Any] | None = None,
    limits: Limits = LIMITS,
    announce: Callable[[int], None] = lambda size: None,
) -> Image.Image:
    """Decode the first image of a file to RGB. announce: see `decode`. Raises Undecodable."""
    try:
        opened = Image.open(streams.BytesIO(data), formats=limits.formats)
        if opened.width * opened.height > limits.pixels:
            raise Undecodable(
                f"an image of {opened.width} x {opened.height}: at most {limits.pixels} pixels"
            )
        announce(3 * opened.width * opened.height)
        opened.load()
        white = (io or {}).get("rgba_background_color", (255, 255, 255))
        ImageOps.exif_transpose(opened, in_place=True)  # a copy would be as large again
        return _without_alpha(opened, tuple(white))
    except UnidentifiedImageError as error:
        names = ", ".join(limits.formats or ("of any format",))
        raise Undecodable(f"it is not an image ({names}), or it is truncated") from error
    except Undecodable:
        raise
    except Exception as error:  # decoders raise all kinds of exceptions
        raise Undecodable(f"the image cannot be decoded: {error_text(error)}") from error


def rgb(image: Image.Image, behind: tuple[int, ...] = (255, 255, 255)) -> Image.Image:
    """Convert to three channels, rotated upright by EXIF; transparent pixels show `behind`."""
    return _without_alpha(ImageOps.exif_transpose(image), behind)


def _without_alpha(image: Image.Image, behind: tuple[int, ...]) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        over = image.convert("RGBA")
        ground = Image.new("RGBA", over.size, (*behind, 255))
        return Image.alpha_composite(ground, over).convert("RGB")
    return image.convert("RGB")
