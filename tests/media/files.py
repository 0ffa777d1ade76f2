"""Makers of small files of images, sound and video."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np
from PIL import Image

__all__ = ["image_file", "shade", "sound_file", "tone", "video_file"]


def image_file(image: Image.Image, form: str = "PNG", **options) -> bytes:
    """A file of a Pillow image."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def tone(seconds: float = 0.5, rate: int = 16000, channels: int = 1) -> np.ndarray:
    """[n] or [n, channels] float32, 440 Hz."""
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    return np.stack([wave] * channels, axis=1).astype(np.float32).squeeze()


def sound_file(samples: np.ndarray, rate: int = 16000, form: str = "WAV", kind=None) -> bytes:
    """A file of sound that libsndfile writes."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=form, subtype=kind)
    return buffer.getvalue()


def video_file(
    frames: int = 20, size=(64, 48), rate: int = 10, form: str = "mp4", codec: str = "mpeg4",
    **options,
) -> bytes:  # fmt: skip
    """A file of frames whose grey says which they are: see `shade`."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = Fraction(1, rate)
        stream.options = options
        for frame_number in range(frames):
            grey = np.full((size[1], size[0], 3), shade(frame_number), np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts = frame_number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def shade(frame_number: int) -> int:
    """The grey of a frame."""
    return frame_number * 20 % 240
