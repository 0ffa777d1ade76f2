"""Media that callers of `LLM` give as values: PIL images, arrays, tensors, frames, paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from modulm.errors import RequestError
from modulm_media.values import KINDS, Media, MediaKind, Sound, Video

__all__ = ["as_image", "as_media", "as_sound", "as_video", "given_media", "rgb"]

#: Samples a second of sound that comes without a rate.
_RATE = 16000


def given_media(
    data: Any, uuids: Mapping[str, Any] | None = None, field: str = "multi_modal_data"
) -> tuple[Media, ...]:
    """`multi_modal_data` of a prompt: kind -> one value or a list of them.

    uuids: kind -> names in the same order, None for those without. Raises RequestError.
    """
    if not isinstance(data, Mapping):
        raise RequestError(f"{field}: a table of kinds is expected", field)
    found: list[Media] = []
    for kind, given in data.items():
        if kind not in KINDS:
            raise RequestError(f"{field}: {kind!r:.40} is none of {', '.join(KINDS)}", field)
        values = _listed(kind, given)
        names = (uuids or {}).get(kind) or [None] * len(values)
        names = [names] if isinstance(names, str) else list(names)
        if len(names) != len(values):
            raise RequestError(
                f"multi_modal_uuids: {len(names)} for {len(values)} {kind} items",
                "multi_modal_uuids",
            )
        found += [as_media(kind, value, name) for value, name in zip(values, names, strict=True)]
    return tuple(found)


def as_media(kind: str, value: Any, uuid: str | None = None) -> Media:
    """One item of a caller's. Raises RequestError for what is no value of its kind."""
    if value is None and uuid is None:
        raise RequestError(f"{kind}: None needs a uuid", "multi_modal_uuids")
    made = None if value is None else _MAKE[kind](value)
    return Media(cast("MediaKind", kind), made, uuid)


def rgb(image: Image.Image) -> Image.Image:
    """Three channels, upright as its EXIF says; what is transparent becomes white."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, over).convert("RGB")
    return image.convert("RGB")


def as_image(value: Any) -> Image.Image:
    """An image of three channels: of a PIL image, an array or tensor [h, w, 3] or [3, h, w] of
    uint8 or of floats from 0 to 1, or a path.
    """
    if isinstance(value, Image.Image):
        return rgb(value)
    if isinstance(value, str | os.PathLike):
        try:
            return rgb(Image.open(Path(value)))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise RequestError(f"image: {error}"[:200], "multi_modal_data") from error
    array = _array(value, "image")
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        raise RequestError(f"image: an array of shape {list(array.shape)}", "multi_modal_data")
    pixels = _bytes(array, "image")
    return rgb(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels))


def as_sound(value: Any) -> Sound:
    """Sound of samples, or of a pair of samples and their rate."""
    rate: Any = _RATE
    if isinstance(value, tuple) and len(value) == 2:
        value, rate = value
    if isinstance(value, Sound):
        return value
    array = _array(value, "audio").astype(np.float32)
    if array.ndim == 2:
        array = array.mean(axis=int(array.shape[0] > array.shape[1]))
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all() or not rate > 0:
        raise RequestError("audio: [samples] of finite numbers, and a rate", "multi_modal_data")
    return Sound(array, int(rate))


def as_video(value: Any) -> Video:
    """A video of frames: an array [n, h, w, 3] or [n, 3, h, w], or a list of images; or a pair of
    these and a table with their `fps`.
    """
    fps = None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, fps = value[0], value[1].get("fps")
    if isinstance(value, Video):
        return value
    if isinstance(value, list | tuple):
        frames = [np.asarray(as_image(frame)) for frame in value]
        if not frames or len({frame.shape for frame in frames}) > 1:
            raise RequestError("video: frames of one size are expected", "multi_modal_data")
        return Video(np.stack(frames), fps)
    array = _array(value, "video")
    if array.ndim == 4 and array.shape[-1] != 3 and array.shape[1] == 3:
        array = np.moveaxis(array, 1, -1)
    if array.ndim != 4 or array.shape[-1] != 3 or not len(array):
        raise RequestError(f"video: an array of shape {list(array.shape)}", "multi_modal_data")
    return Video(_bytes(array, "video"), fps)


_MAKE: Mapping[str, Callable[[Any], Any]] = {
    "image": as_image,
    "audio": as_sound,
    "video": as_video,
}


def _listed(kind: str, given: Any) -> list[Any]:
    """The values of a kind: one, or a list. A list of images is one video, and a list of numbers
    one sound.
    """
    if not isinstance(given, list):
        return [given]
    if kind == "video" and given and isinstance(given[0], Image.Image):
        return [given]
    if kind == "audio" and given and isinstance(given[0], int | float):
        return [given]
    return given


def _array(value: Any, kind: str) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu().float() if value.is_floating_point() else value.cpu()
    if not isinstance(value, np.ndarray | Sequence) and not hasattr(value, "__array__"):
        raise RequestError(f"{kind}: {type(value).__name__} is no {kind}", "multi_modal_data")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{kind}: {error}"[:200], "multi_modal_data") from error
    if array.dtype.kind not in "uif":
        raise RequestError(f"{kind}: an array of {array.dtype}", "multi_modal_data")
    return array


def _bytes(array: np.ndarray, kind: str) -> np.ndarray:
    """uint8 of uint8, or of floats from 0 to 1."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if (
        array.dtype.kind != "f"
        or not np.isfinite(array).all()
        or array.min() < 0
        or array.max() > 1
    ):
        raise RequestError(
            f"{kind}: bytes, or floats from 0 to 1 are expected, not {array.dtype}",
            "multi_modal_data",
        )
    return np.ascontiguousarray((array * 255).round().astype(np.uint8))
