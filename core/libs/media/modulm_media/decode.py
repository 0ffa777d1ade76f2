"""Files of images, sound and video, as bytes, to values.

What a file holds is found out from its content, whatever its name or type say. Files of strangers
are decoded in processes of their own (`modulm_media.workers`).
"""

from __future__ import annotations

import io as streams
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from modulm_media.limits import LIMITS, Limits, Undecodable, said
from modulm_media.sound_files import decode_sound
from modulm_media.values import Sound, Video
from modulm_media.video_files import decode_video

__all__ = ["decode", "decode_image", "rgb"]


def decode(
    kind: str, data: bytes, io: Mapping[str, Any], limits: Limits = LIMITS
) -> Image.Image | Sound | Video:
    """The value of a file; io: what `--media-io-kwargs` has for its kind, and the `rate` that sound
    is to have.

    Raises Undecodable.
    """
    if not data:
        raise Undecodable("it is empty")
    if kind == "image":
        return decode_image(data, io, limits)
    if kind == "audio":
        return decode_sound(data, io, limits)
    return decode_video(data, io, limits)


def decode_image(
    data: bytes, io: Mapping[str, Any] | None = None, limits: Limits = LIMITS
) -> Image.Image:
    """The first image of a file, in RGB. Raises Undecodable."""
    try:
        opened = Image.open(streams.BytesIO(data), formats=limits.formats)
        if opened.width * opened.height > limits.pixels:
            raise Undecodable(
                f"an image of {opened.width} x {opened.height}: at most {limits.pixels} pixels"
            )
        opened.load()
        white = (io or {}).get("rgba_background_color", (255, 255, 255))
        return rgb(opened, tuple(white))
    except UnidentifiedImageError as error:
        names = ", ".join(limits.formats or ("of any format",))
        raise Undecodable(f"it is no image ({names}), or not a whole one") from error
    except Undecodable:
        raise
    except Exception as error:  # decoders raise whatever their formats' authors thought of
        raise Undecodable(f"the image cannot be decoded: {said(error)}") from error


def rgb(image: Image.Image, behind: tuple[int, ...] = (255, 255, 255)) -> Image.Image:
    """Three channels, upright as its EXIF says; what is transparent shows what is `behind`."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        over = image.convert("RGBA")
        ground = Image.new("RGBA", over.size, (*behind, 255))
        return Image.alpha_composite(ground, over).convert("RGB")
    return image.convert("RGB")
