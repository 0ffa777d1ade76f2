"""Decode audio files: libsndfile's formats (WAV, FLAC, Ogg, MP3 ...), others with FFmpeg."""

from __future__ import annotations

import io as streams
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from modulm_media.containers import opened
from modulm_media.limits import Limits, Undecodable, error_text
from modulm_media.values import Sound

__all__ = ["decode_sound"]

_BLOCK = 1 << 16
_CHANNELS = 16
_FASTEST = 400_000


def decode_sound(data: bytes, io: Mapping[str, Any], limits: Limits) -> Sound:
    """Decode a sound file to one channel.

    io: `rate`, the target sample rate in Hz. Raises Undecodable. Source: libsndfile, FFmpeg.
    """
    import soundfile

    try:
        with soundfile.SoundFile(streams.BytesIO(data)) as file:
            return _gathered(file.samplerate, file.channels, _read(file), io, limits)
    except soundfile.LibsndfileError:
        pass
    except (RuntimeError, TypeError, OSError) as error:
        raise Undecodable(f"the audio cannot be decoded: {error_text(error)}") from error
    with opened(data) as container:
        if not container.streams.audio:
            raise Undecodable("it has no audio")
        context = container.streams.audio[0].codec_context
        rate, channels = int(context.sample_rate or 0), int(context.layout.nb_channels)
        return _gathered(rate, channels, _decoded(container, rate), io, limits)


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
    rate: int, channels: int, pieces: Iterator[np.ndarray], io: Mapping[str, Any], limits: Limits
) -> Sound:
    """Mix to one channel and resample to the rate in `io`, piece by piece."""
    if not 0 < channels <= _CHANNELS or not 0 < rate <= _FASTEST:
        raise Undecodable(f"not supported: {channels} channels at {rate} samples per second")
    target_rate = int(io.get("rate") or rate)
    stream = None
    if target_rate != rate:
        from soxr import ResampleStream

        stream = ResampleStream(rate, target_rate, 1, dtype="float32")
    most, count, chunks = int(limits.seconds * rate), 0, []
    for piece in pieces:
        mono = piece.mean(axis=1, dtype=np.float32) if piece.shape[1] > 1 else piece[:, 0]
        if not np.isfinite(mono).all():
            raise Undecodable("its samples are not all finite")
        count += len(mono)
        if count > most:
            raise Undecodable(f"more than {limits.seconds:g} seconds of audio")
        chunks.append(mono if stream is None else stream.resample_chunk(mono))
    if not count:
        raise Undecodable("it has no audio")
    if stream is not None:
        chunks.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    return Sound(np.concatenate(chunks), target_rate)
