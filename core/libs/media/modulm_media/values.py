"""Decoded media, as they enter a prompt."""

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
    """samples: [n] float32, one channel; rate: samples per second."""

    samples: np.ndarray
    rate: int

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / self.rate

    def at(self, rate: int) -> Sound:
        """Resample to `rate` samples per second."""
        if rate == self.rate:
            return self
        import soxr

        samples = soxr.resample(np.ascontiguousarray(self.samples, np.float32), self.rate, rate)
        return Sound(samples, rate)


@frozen(eq=False)
class Video:
    """A video as a selection of frames.

    frames: [n, height, width, 3] uint8. fps: frames per second of the source, None if unknown.
    indices: [n] int64, indices of the frames in the source; None means all, in order. total: number
    of frames in the source; None means len(frames).
    """

    frames: np.ndarray
    fps: float | None = None
    indices: np.ndarray | None = None
    total: int | None = None

    @property
    def frame_indices(self) -> np.ndarray:
        """[n] int64, indices of the frames in the source."""
        return np.arange(len(self.frames)) if self.indices is None else self.indices

    def seconds(self, fps: float = 24.0) -> np.ndarray:
        """[n] float64, when each frame is shown; fps: used if the video has none."""
        return self.frame_indices / (self.fps or fps)

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
            "frames_indices": self.frame_indices.tolist(),
        }


@frozen(eq=False)
class Processed:
    """The processor's output for one image, sound or video.

    tokens: [n] int64, replace the placeholder in the prompt. embedded: [n] bool, tokens whose
    embedding the encoder provides. tensors: encoder inputs by name. spans: (first, end) of tokens,
    relative to the first, that attend to each other in both directions. hash: of its item, if it
    differs from the cache key. encoder_outputs: number of encoder outputs, in families that set
    `crosses` or `looks`.
    """

    kind: str
    tokens: np.ndarray
    embedded: np.ndarray
    tensors: Mapping[str, np.ndarray]
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of each run of embedded tokens."""
        return runs_of(self.embedded)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors and tokens."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) + self.tokens.nbytes

    hash: bytes | None = None
    encoder_outputs: int = 0


def _name_of(media: Media) -> bytes:
    if media.uuid is not None:
        return fingerprint(media.kind, "uuid", media.uuid)
    if media.value is None:
        raise ValueError("media without a value need a uuid")
    return digest_of(media.kind, media.value)


@frozen(eq=False)
class Media:
    """One image (PIL, RGB), sound or video of a prompt.

    uuid: the caller's name for it; with a uuid, `value` may be None for media sent before. hash: of
    the content, or of the uuid. processed: the processor's output, if known.
    """

    kind: MediaKind
    value: Image | Sound | Video | None
    uuid: str | None = None
    hash: bytes = field(default=Factory(_name_of, takes_self=True))
    processed: Processed | None = None


def digest_of(kind: str, value: Image | Sound | Video) -> bytes:
    """32-byte hash of the content."""
    if isinstance(value, Sound):
        return fingerprint(kind, value.rate, np.ascontiguousarray(value.samples, np.float32))
    if isinstance(value, Video):
        frames = np.ascontiguousarray(value.frames)
        return fingerprint(kind, value.fps, value.total, value.frame_indices, frames)
    return fingerprint(kind, value.mode, value.size, value.tobytes())


def fingerprint(*parts: Any) -> bytes:
    """32-byte hash of the parts: bytes, arrays and JSON values."""
    digest = blake2b(digest_size=32)
    for part in parts:
        if isinstance(part, np.ndarray):
            shape = json.dumps([part.dtype.str, part.shape]).encode()
            data = part.tobytes()
        elif isinstance(part, bytes):
            shape, data = b"bytes", part
        else:
            shape, data = b"json", _canonical(part)
        digest.update(len(shape).to_bytes(8, "little") + shape)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _canonical(value: Any) -> bytes:
    """JSON with sorted keys; values without a JSON form are printed."""
    table = dict(value) if isinstance(value, Mapping) else value
    return json.dumps(table, sort_keys=True, default=str).encode()


def runs_of(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(first, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
