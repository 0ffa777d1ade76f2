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

__all__ = [
    "KINDS",
    "Media",
    "MediaKind",
    "Processed",
    "Sound",
    "Video",
    "digest_of",
    "fingerprint",
    "runs_of",
]


@frozen(eq=False)
class Sound:
    """samples: [n] float32, one channel; rate: samples a second."""

    samples: np.ndarray
    rate: int

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return len(self.samples) / self.rate

    def at(self, rate: int) -> Sound:
        """The sound with so many samples a second."""
        if rate == self.rate:
            return self
        import soxr

        found = soxr.resample(np.ascontiguousarray(self.samples, np.float32), self.rate, rate)
        return Sound(found, rate)


@frozen(eq=False)
class Video:
    """frames: [n, height, width, 3] uint8. fps: frames a second of what they were taken from, None
    if nobody said. indices: [n] int64, which frames of that they are; None: all, in order. total:
    how many it has; None: as many as there are here.
    """

    frames: np.ndarray
    fps: float | None = None
    indices: np.ndarray | None = None
    total: int | None = None

    @property
    def places(self) -> np.ndarray:
        """[n] int64, which frames of the source these are."""
        return np.arange(len(self.frames)) if self.indices is None else self.indices

    def seconds(self, fps: float = 24.0) -> np.ndarray:
        """[n] float64, when each frame is shown; fps: where the video does not say."""
        return self.places / (self.fps or fps)

    def metadata(self) -> dict[str, Any]:
        """The fields of transformers' `VideoMetadata`."""
        total = len(self.frames) if self.total is None else self.total
        height, width = self.frames.shape[1:3]
        return {
            "total_num_frames": total,
            "fps": self.fps,
            "duration": None if self.fps is None else total / self.fps,
            "width": width,
            "height": height,
            "video_backend": "pyav",
            "frames_indices": self.places.tolist(),
        }


@frozen(eq=False)
class Processed:
    """What one image, sound or video becomes.

    tokens: [n] int64, what stands in the prompt in place of its placeholder. embedded: [n] bool,
    those that embeddings of the encoder replace. tensors: what the encoder takes, by name. spans:
    (first, end) of tokens, counted from the first, that see each other in both directions. hash:
    of its item, where that is not the name under which it is kept. given: of a family that
    `crosses` or `looks`, how many outputs its encoder will give.
    """

    kind: str
    tokens: np.ndarray
    embedded: np.ndarray
    tensors: Mapping[str, np.ndarray]
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of the tokens that embeddings replace, those without others between them."""
        return runs_of(self.embedded)

    hash: bytes | None = None
    given: int = 0


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
    what it is, or of its name. processed: what the processor has made of it, where that is known.
    """

    kind: MediaKind
    value: Image | Sound | Video | None
    uuid: str | None = None
    hash: bytes = field(default=Factory(_name_of, takes_self=True))
    processed: Processed | None = None


def digest_of(kind: str, value: Image | Sound | Video) -> bytes:
    """32 bytes that name the content."""
    if isinstance(value, Sound):
        return fingerprint(kind, value.rate, np.ascontiguousarray(value.samples, np.float32))
    if isinstance(value, Video):
        frames = np.ascontiguousarray(value.frames)
        return fingerprint(kind, value.fps, value.total, value.places, frames)
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


def runs_of(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(first, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
