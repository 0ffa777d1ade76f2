"""Decode audio files: libsndfile's formats (WAV, FLAC, Ogg, MP3 ...), others with FFmpeg."""

from __future__ import annotations

import io as streams
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from modulm_media.containers import opened
from modulm_media.limits import Limits, Undecodable, error_text
from modulm_media.values import Sound

__all__ = ["decode_sound"]

_BLOCK = 1 << 16
_CHANNELS = 16
_FASTEST = 400_000
#: Samples announced at once where the header does not tell the length, or is wrong.
_MORE = 1 << 18
#: libsndfile's number of samples for an unknown length is near 2**63.
_UNKNOWN = 1 << 62


def decode_sound(
    data: bytes,
    io: Mapping[str, Any],
    limits: Limits,
    announce: Callable[[int], None] = lambda size: None,
) -> Sound:
    """Decode a sound file to one channel.

    io: `rate`, the target sample rate in Hz. announce: called with the bytes of the samples before
    they are decoded, as the header tells their number; where it tells none, or fewer than there
    are, again for each further mebibyte. Raises Undecodable. Source: libsndfile, FFmpeg.
    """
    import soundfile

    try:
        with soundfile.SoundFile(streams.BytesIO(data)) as file:
            length = file.frames if 0 < file.frames < _UNKNOWN else None
            facts = file.samplerate, file.channels, length
            return _gathered(*facts, _read(file), io, limits, announce)
    except soundfile.LibsndfileError:
        pass
    except (RuntimeError, TypeError, OSError) as error:
        raise Undecodable(f"the audio cannot be decoded: {error_text(error)}") from error
    with opened(data) as container:
        if not container.streams.audio:
            raise Undecodable("it has no audio")
        context = container.streams.audio[0].codec_context
        if context is None:
            raise Undecodable("there is no decoder for its sound")
        rate, channels = int(context.sample_rate or 0), int(context.layout.nb_channels)
        length = _length(container, rate)
        pieces = _decoded(container, rate)
        return _gathered(rate, channels, length, pieces, io, limits, announce)


def _length(container: Any, rate: int) -> int | None:
    """The number of samples that the header tells, or None."""
    stream = container.streams.audio[0]
    seconds = 0.0
    if stream.duration is not None and stream.time_base is not None:
        seconds = float(stream.duration * stream.time_base)
    elif container.duration is not None:
        seconds = container.duration / 1e6
    return math.ceil(seconds * rate) if seconds > 0 else None


def _read(file: Any) -> Iterator[np.ndarray]:
    """[n, channels] float32, in pieces."""
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        yield block


def _decoded(container: Any, rate: int) -> Iterator[np.ndarray]:
    """[n, channels] float32, in pieces."""
    from av.audio.resampler import AudioResampler

    resampler = AudioResampler(format="fltp", rate=rate)
    for frame in container.decode(audio=0):
        for piece in resampler.resample(frame):
            yield piece.to_ndarray().T
    for piece in resampler.resample(None):
        yield piece.to_ndarray().T


def _gathered(
    rate: int,
    channels: int,
    length: int | None,
    pieces: Iterator[np.ndarray],
    io: Mapping[str, Any],
    limits: Limits,
    announce: Callable[[int], None],
) -> Sound:
    """Mix to one channel and resample to the rate in `io`, piece by piece.

    length: the number of samples by the header, None if unknown.
    """
    if not 0 < channels <= _CHANNELS or not 0 < rate <= _FASTEST:
        raise Undecodable(f"not supported: {channels} channels at {rate} samples per second")
    target_rate = int(io.get("rate") or rate)
    stream = None
    if target_rate != rate:
        from soxr import ResampleStream

        stream = ResampleStream(rate, target_rate, 1, dtype="float32")
    most, count, chunks = int(limits.seconds * rate), 0, []
    announced = min(_MORE if length is None else length, most)
    announce(_bytes(announced, rate, target_rate))
    for piece in pieces:
        mono = piece.mean(axis=1, dtype=np.float32) if piece.shape[1] > 1 else piece[:, 0]
        if not np.isfinite(mono).all():
            raise Undecodable("its samples are not all finite")
        count += len(mono)
        if count > most:
            raise Undecodable(f"more than {limits.seconds:g} seconds of audio")
        if count > announced:
            more = max(_MORE, count - announced)
            announce(_bytes(more, rate, target_rate))
            announced += more
        chunks.append(mono if stream is None else stream.resample_chunk(mono))
    if not count:
        raise Undecodable("it has no audio")
    if stream is not None:
        chunks.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    return Sound(np.concatenate(chunks), target_rate)


def _bytes(samples: int, rate: int, target_rate: int) -> int:
    """Bytes of samples after resampling."""
    return 4 * math.ceil(samples * target_rate / rate)
