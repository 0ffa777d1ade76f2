"""What a caller gives, once it is fetched and decoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import Factory, field, frozen

from modulm_media.flags import KINDS, MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["KINDS", "Media", "MediaKind", "Sound", "Video", "digest_of", "fingerprint"]


@frozen(eq=False)
class Sound:
    """samples: [n] float32, one channel; rate: samples a second."""

    samples: np.ndarray
    rate: int


@frozen(eq=False)
class Video:
    """frames: [n, height, width, 3] uint8; fps: frames a second, None if nobody said."""

    frames: np.ndarray
    fps: float | None = None


def _name_of(media: Media) -> bytes:
    if media.uuid is not None:
        return fingerprint(media.kind, "uuid", media.uuid)
    if media.value is None:
        raise ValueError("media without a value need a uuid")
    return digest_of(media.kind, media.value)


@frozen(eq=False)
class Media:
    """One image (PIL, RGB), sound or video of a prompt.

    uuid: the caller's name for it; with one, `value` may be None for what was sent before. hash: of
    what it is, or of its name.
    """

    kind: MediaKind
    value: Image | Sound | Video | None
    uuid: str | None = None
    hash: bytes = field(default=Factory(_name_of, takes_self=True))


def digest_of(kind: str, value: Image | Sound | Video) -> bytes:
    """32 bytes that name the content."""
    if isinstance(value, Sound):
        return fingerprint(kind, value.rate, np.ascontiguousarray(value.samples, np.float32))
    if isinstance(value, Video):
        return fingerprint(kind, value.fps, np.ascontiguousarray(value.frames))
    return fingerprint(kind, value.mode, value.size, value.tobytes())


def fingerprint(*parts: Any) -> bytes:
    """32 bytes that name the parts: bytes, arrays and whatever JSON has a form for."""
    found = blake2b(digest_size=32)
    for part in parts:
        if isinstance(part, np.ndarray):
            shape = json.dumps([part.dtype.str, part.shape]).encode()
            data = part.tobytes()
        elif isinstance(part, bytes):
            shape, data = b"bytes", part
        else:
            shape, data = b"json", _canonical(part)
        found.update(len(shape).to_bytes(8, "little") + shape)
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.digest()


def _canonical(value: Any) -> bytes:
    """JSON with sorted keys; what it has no form for, as it is printed."""
    table = dict(value) if isinstance(value, Mapping) else value
    return json.dumps(table, sort_keys=True, default=str).encode()
