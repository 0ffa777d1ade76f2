"""Write sound files piece by piece: WAV and raw samples here, compressed formats with FFmpeg."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from attrs import frozen

from modulm.errors import UnsupportedError

__all__ = ["FORMATS", "SoundFormat", "SoundWriter", "open_writer"]

_FULL = 32767
#: Size in a WAV header for a length that is not known when it is written (RFC 2361 leaves it open;
#: FFmpeg, libsndfile and browsers read up to the end).
_UNKNOWN = 0xFFFFFFFF


@frozen
class SoundFormat:
    """A format of sound files. codec, container: FFmpeg's names, empty for those written here."""

    name: str
    media_type: str
    codec: str = ""
    container: str = ""


#: Formats by OpenAI's names.
FORMATS: Mapping[str, SoundFormat] = MappingProxyType(
    {
        form.name: form
        for form in (
            SoundFormat("mp3", "audio/mpeg", "libmp3lame", "mp3"),
            SoundFormat("opus", "audio/ogg", "libopus", "ogg"),
            SoundFormat("aac", "audio/aac", "aac", "adts"),
            SoundFormat("flac", "audio/flac", "flac", "flac"),
            SoundFormat("wav", "audio/wav"),
            SoundFormat("pcm", "audio/pcm"),
        )
    }
)


class SoundWriter:
    """Writes raw samples: 16 bits, little-endian, one channel."""

    def add(self, samples: np.ndarray) -> bytes:
        """Return the next bytes of the file. samples: [n] float32 in -1 to 1."""
        return _pcm(samples).tobytes()

    def finish(self) -> bytes:
        """Return the last bytes of the file."""
        return b""


class _WavWriter(SoundWriter):
    """WAV without a length in its header."""

    def __init__(self, rate: int) -> None:
        head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", _UNKNOWN, b"WAVE", b"fmt ", 16, 1, 1,
                           rate, 2 * rate, 2, 16, b"data", _UNKNOWN)  # fmt: skip
        self._head = head

    def add(self, samples: np.ndarray) -> bytes:
        head, self._head = self._head, b""
        return head + super().add(samples)

    def finish(self) -> bytes:
        return self._head


class _Written(io.RawIOBase):
    """A file that cannot be rewound; `take` returns what was written since the last call."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


class _EncodedWriter(SoundWriter):
    """A format that FFmpeg encodes."""

    def __init__(self, form: SoundFormat, rate: int) -> None:
        import av

        self._file = _Written()
        self._container: Any = av.open(self._file, "w", format=form.container)
        self._stream: Any = self._container.add_stream(form.codec, rate=rate, layout="mono")
        self._rate, self._count = rate, 0

    def add(self, samples: np.ndarray) -> bytes:
        import av

        if len(samples):
            frame = av.AudioFrame.from_ndarray(_pcm(samples)[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts = self._rate, self._count
            self._count += len(samples)
            self._container.mux(self._stream.encode(frame))
        return self._file.take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._file.take()


def open_writer(name: str, rate: int) -> SoundWriter:
    """Open a file of one channel in a format of `FORMATS`. rate: samples per second.

    Raises UnsupportedError, naming others, for a format that this FFmpeg has no encoder for.
    """
    form = FORMATS[name]
    if not form.codec:
        return _WavWriter(rate) if name == "wav" else SoundWriter()
    import av

    try:
        return _EncodedWriter(form, rate)
    except (av.FFmpegError, ValueError) as error:
        raise UnsupportedError(
            f"{name} cannot be written here ({form.codec}: {error}); wav and pcm always can"
        ) from error


def _pcm(samples: np.ndarray) -> np.ndarray:
    """[n] float32 in -1 to 1 -> [n] int16, little-endian."""
    rounded: np.ndarray = np.round(np.clip(samples, -1.0, 1.0) * _FULL).astype("<i2")
    return rounded
