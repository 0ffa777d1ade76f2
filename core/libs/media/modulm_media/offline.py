"""Media that callers of `LLM` give: PIL images, arrays, tensors, frames, paths, files as bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from PIL import Image

from modulm.errors import RequestError
from modulm_media.decode import decode, rgb
from modulm_media.limits import Limits, Undecodable
from modulm_media.values import KINDS, Media, MediaKind, Sound, Video

__all__ = ["OWN", "as_image", "as_media", "as_sound", "as_video", "given_media"]

#: Samples a second of sound that comes without a rate.
_RATE = 16000
_FASTEST = 1_000_000
#: Callers' own files: what this machine can hold.
OWN = Limits(formats=None, pixels=1 << 30, seconds=1e6, frames=1 << 20, room=16 << 30)


def given_media(
    data: Any,
    uuids: Mapping[str, Any] | None = None,
    field: str = "multi_modal_data",
    io: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Media, ...]:
    """`multi_modal_data` of a prompt: kind -> one value or a list of them.

    uuids: kind -> names in the same order, None for those without. io: how files are decoded, by
    kind, as `--media-io-kwargs` has it. Raises RequestError.
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
        pairs = zip(values, names, strict=True)
        found += [as_media(kind, value, name, (io or {}).get(kind)) for value, name in pairs]
    return tuple(found)


def as_media(
    kind: str, value: Any, uuid: str | None = None, io: Mapping[str, Any] | None = None
) -> Media:
    """One item of a caller's; io: how a file of this kind is decoded.

    Raises RequestError for what is no value of its kind.
    """
    if value is None and uuid is None:
        raise RequestError(f"{kind}: None needs a uuid", "multi_modal_uuids")
    value = _read(kind, value, io or {})
    made = None if value is None else _MAKE[kind](value)
    return Media(cast("MediaKind", kind), made, uuid)


def _read(kind: str, value: Any, io: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """What a file holds, where the value is a path or the file's bytes; else the value."""
    if not isinstance(value, str | os.PathLike | bytes):
        return value
    try:
        data = value if isinstance(value, bytes) else Path(value).read_bytes()
        return decode(kind, data, io, OWN)
    except (OSError, Undecodable) as error:
        raise RequestError(f"{kind}: {error}"[:200], "multi_modal_data") from error


def as_image(value: Any) -> Image.Image:
    """An image of three channels: of a PIL image, an array or tensor [h, w, 3] or [3, h, w] of
    uint8 or of floats from 0 to 1, or a path or what a file holds.
    """
    value = _read("image", value)
    if isinstance(value, Image.Image):
        return rgb(value)
    array = _array(value, "image")
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        raise RequestError(f"image: an array of shape {list(array.shape)}", "multi_modal_data")
    pixels = _bytes(array, "image")
    return rgb(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels))


def as_sound(value: Any) -> Sound:
    """Sound of samples, or of a pair of samples and their rate, or of a file."""
    rate: Any = _RATE
    value = _read("audio", value)
    if isinstance(value, tuple) and len(value) == 2:
        value, rate = value
    if isinstance(value, Sound):
        return value
    if not isinstance(rate, int | float | np.number) or not 0 < rate < _FASTEST:
        raise RequestError("audio: samples and their rate are expected", "multi_modal_data")
    array = _array(value, "audio")
    array = array.astype(np.float32) / (_full(array) if array.dtype.kind in "ui" else 1)
    if array.ndim == 2:
        array = array.mean(axis=int(array.shape[0] > array.shape[1]))
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise RequestError("audio: [samples] of finite numbers, and a rate", "multi_modal_data")
    return Sound(array, int(rate))


def as_video(value: Any) -> Video:
    """A video of frames: an array [n, h, w, 3] or [n, 3, h, w], or a list of images; or a pair of
    these and a table with their `fps`, `frames_indices` and `total_num_frames`; or a file.
    """
    value = _read("video", value)
    told: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, told = value
    if isinstance(value, Video):
        return value
    if isinstance(value, list | tuple):
        frames = [np.asarray(as_image(frame)) for frame in value]
        if not frames or len({frame.shape for frame in frames}) > 1:
            raise RequestError("video: frames of one size are expected", "multi_modal_data")
        return _told(np.stack(frames), told)
    array = _array(value, "video")
    if array.ndim == 4 and array.shape[-1] != 3 and array.shape[1] == 3:
        array = np.moveaxis(array, 1, -1)
    if array.ndim != 4 or array.shape[-1] != 3 or not len(array):
        raise RequestError(f"video: an array of shape {list(array.shape)}", "multi_modal_data")
    return _told(_bytes(array, "video"), told)


def _told(frames: np.ndarray, told: Mapping[str, Any]) -> Video:
    """A video of frames and what is told of them, by the names of transformers and vLLM."""
    fps, indices = told.get("fps"), told.get("frames_indices")
    total = told.get("total_num_frames")
    if fps is not None and (not isinstance(fps, int | float) or not 0 < fps < 1e6):
        raise RequestError("video: fps is a number above 0", "multi_modal_data")
    places = None if indices is None else np.asarray(indices)
    if places is not None and (places.shape != (len(frames),) or places.dtype.kind not in "ui"):
        raise RequestError("video: frames_indices has a place for each frame", "multi_modal_data")
    if total is not None and (not isinstance(total, int) or total < len(frames)):
        raise RequestError("video: total_num_frames is less than there are", "multi_modal_data")
    places = None if places is None else places.astype(np.int64)
    return Video(frames, None if fps is None else float(fps), places, total)


_MAKE: Mapping[str, Callable[[Any], Any]] = {
    "image": as_image,
    "audio": as_sound,
    "video": as_video,
}


def _full(array: np.ndarray) -> float:
    """The loudest sample of integers that have a sign."""
    if array.dtype.kind == "u":
        raise RequestError(f"audio: samples of {array.dtype}", "multi_modal_data")
    return float(np.iinfo(array.dtype).max) + 1


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
