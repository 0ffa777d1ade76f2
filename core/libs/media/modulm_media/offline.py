"""Media passed to `LLM`: PIL images, arrays, tensors, frames, paths, bytes of files."""

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

__all__ = ["OWN", "as_image", "as_media", "as_sound", "as_video", "parse_media"]

#: Default sample rate in Hz.
_RATE = 16000
_FASTEST = 1_000_000
#: Limits for callers' own files: only what the machine can hold.
OWN = Limits(formats=None, pixels=1 << 30, seconds=1e6, frames=1 << 20, room=16 << 30)


def parse_media(
    data: Any,
    uuids: Mapping[str, Any] | None = None,
    field: str = "multi_modal_data",
    io: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Media, ...]:
    """Parse `multi_modal_data` of a prompt: kind -> one value or a list.

    uuids: kind -> names in the same order, None for items without one. io: decoding options by
    kind, as in `--media-io-kwargs`. Raises RequestError.
    """
    if not isinstance(data, Mapping):
        raise RequestError(f"{field}: a table of kinds is expected", field)
    items: list[Media] = []
    for kind, kind_data in data.items():
        if kind not in KINDS:
            raise RequestError(f"{field}: {kind!r:.40} is none of {', '.join(KINDS)}", field)
        values = _listed(kind, kind_data)
        names = (uuids or {}).get(kind) or [None] * len(values)
        names = [names] if isinstance(names, str) else list(names)
        if len(names) != len(values):
            raise RequestError(
                f"multi_modal_uuids: {len(names)} for {len(values)} {kind} items",
                "multi_modal_uuids",
            )
        pairs = zip(values, names, strict=True)
        items += [as_media(kind, value, name, (io or {}).get(kind)) for value, name in pairs]
    return tuple(items)


def as_media(
    kind: str, value: Any, uuid: str | None = None, io: Mapping[str, Any] | None = None
) -> Media:
    """Make one item from a caller's value; io: decoding options for its kind.

    Raises RequestError for values that do not fit the kind.
    """
    if value is None and uuid is None:
        raise RequestError(f"{kind}: None needs a uuid", "multi_modal_uuids")
    value = _read(kind, value, io or {})
    parsed = None if value is None else _MAKE[kind](value)
    return Media(cast("MediaKind", kind), parsed, uuid)


def _read(kind: str, value: Any, io: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Decode a path or the bytes of a file; other values are returned unchanged."""
    if not isinstance(value, str | os.PathLike | bytes):
        return value
    try:
        data = value if isinstance(value, bytes) else Path(value).read_bytes()
        return decode(kind, data, io, OWN)
    except (OSError, Undecodable) as error:
        raise RequestError(f"{kind}: {error}"[:200], "multi_modal_data") from error


def as_image(value: Any) -> Image.Image:
    """Make an RGB image.

    Accepts a PIL image, an array or tensor [h, w, 3] or [3, h, w] of uint8 or of floats from 0 to
    1, a path, or the bytes of a file.
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
    """Make a sound from samples, from a pair of samples and their rate, or from a file."""
    rate: Any = _RATE
    value = _read("audio", value)
    if isinstance(value, tuple) and len(value) == 2:
        value, rate = value
    if isinstance(value, Sound):
        return value
    if not isinstance(rate, int | float | np.number) or not 0 < rate < _FASTEST:
        raise RequestError("audio: must be samples and their rate", "multi_modal_data")
    array = _array(value, "audio")
    array = array.astype(np.float32) / (_full(array) if array.dtype.kind in "ui" else 1)
    if array.ndim == 2:
        array = array.mean(axis=int(array.shape[0] > array.shape[1]))
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise RequestError("audio: [samples] of finite numbers, and a rate", "multi_modal_data")
    return Sound(array, int(rate))


def as_video(value: Any) -> Video:
    """Make a video.

    Accepts frames as an array [n, h, w, 3] or [n, 3, h, w] or a list of images; a pair of these and
    a table with `fps`, `frames_indices` and `total_num_frames`; or a file.
    """
    value = _read("video", value)
    metadata: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metadata = value
    if isinstance(value, Video):
        return value
    if isinstance(value, list | tuple):
        frames = [np.asarray(as_image(frame)) for frame in value]
        if not frames or len({frame.shape for frame in frames}) > 1:
            raise RequestError("video: all frames must have the same size", "multi_modal_data")
        return _with_metadata(np.stack(frames), metadata)
    array = _array(value, "video")
    if array.ndim == 4 and array.shape[-1] != 3 and array.shape[1] == 3:
        array = np.moveaxis(array, 1, -1)
    if array.ndim != 4 or array.shape[-1] != 3 or not len(array):
        raise RequestError(f"video: an array of shape {list(array.shape)}", "multi_modal_data")
    return _with_metadata(_bytes(array, "video"), metadata)


def _with_metadata(frames: np.ndarray, metadata: Mapping[str, Any]) -> Video:
    """Make a video from frames and metadata with the names of transformers and vLLM."""
    fps, indices = metadata.get("fps"), metadata.get("frames_indices")
    total = metadata.get("total_num_frames")
    if fps is not None and (not isinstance(fps, int | float) or not 0 < fps < 1e6):
        raise RequestError("video: fps must be a number above 0", "multi_modal_data")
    frame_indices = None if indices is None else np.asarray(indices)
    if frame_indices is not None and (
        frame_indices.shape != (len(frames),) or frame_indices.dtype.kind not in "ui"
    ):
        raise RequestError("video: frames_indices needs one index per frame", "multi_modal_data")
    if total is not None and (not isinstance(total, int) or total < len(frames)):
        raise RequestError(
            "video: total_num_frames is less than the number of frames", "multi_modal_data"
        )
    frame_indices = None if frame_indices is None else frame_indices.astype(np.int64)
    return Video(frames, None if fps is None else float(fps), frame_indices, total)


_MAKE: Mapping[str, Callable[[Any], Any]] = {
    "image": as_image,
    "audio": as_sound,
    "video": as_video,
}


def _full(array: np.ndarray) -> float:
    """Return the full scale of signed integer samples."""
    if array.dtype.kind == "u":
        raise RequestError(f"audio: samples of {array.dtype}", "multi_modal_data")
    return float(np.iinfo(array.dtype).max) + 1


def _listed(kind: str, value: Any) -> list[Any]:
    """Values of a kind as a list. A list of images is one video, a list of numbers one sound."""
    if not isinstance(value, list):
        return [value]
    if kind == "video" and value and isinstance(value[0], Image.Image):
        return [value]
    if kind == "audio" and value and isinstance(value[0], int | float):
        return [value]
    return value


def _array(value: Any, kind: str) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu().float() if value.is_floating_point() else value.cpu()
    if not isinstance(value, np.ndarray | Sequence) and not hasattr(value, "__array__"):
        raise RequestError(
            f"{kind}: {type(value).__name__} is not a valid {kind}", "multi_modal_data"
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{kind}: {error}"[:200], "multi_modal_data") from error
    if array.dtype.kind not in "uif":
        raise RequestError(f"{kind}: an array of {array.dtype}", "multi_modal_data")
    return array


def _bytes(array: np.ndarray, kind: str) -> np.ndarray:
    """Convert floats from 0 to 1 to uint8; uint8 stays."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if (
        array.dtype.kind != "f"
        or not np.isfinite(array).all()
        or array.min() < 0
        or array.max() > 1
    ):
        raise RequestError(
            f"{kind}: must be bytes, or floats from 0 to 1, not {array.dtype}",
            "multi_modal_data",
        )
    return np.ascontiguousarray((array * 255).round().astype(np.uint8))
