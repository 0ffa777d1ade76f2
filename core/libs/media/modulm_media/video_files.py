"""Video files: decode evenly spread frames."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
from attrs import frozen

from modulm_media.containers import opened
from modulm_media.limits import Limits, Undecodable
from modulm_media.values import Video

__all__ = ["decode_video", "sampled_frames"]

#: Default number of frames, as in vLLM.
_FRAMES = 32
#: Limit of frames in a file, because all its packets are scanned.
_MOST = 2_000_000


def decode_video(
    data: bytes,
    io: Mapping[str, Any],
    limits: Limits,
    announce: Callable[[int], None] = lambda size: None,
) -> Video:
    """Decode frames of the file's first video.

    io: `num_frames`, -1 for all; `fps`, frames to take per second, at most `num_frames` in total.
    announce: called with the bytes of all these frames before the first is decoded. Raises
    Undecodable. Source: FFmpeg.
    """
    with opened(data) as container:
        index = _indexed(container)
    selected = sampled_frames(index.count, index.fps, io)
    if len(selected) > limits.frames:
        raise Undecodable(
            f"{len(selected)} of {index.count} frames requested, limit {limits.frames}; "
            "ask for fewer (num_frames, fps)"
        )
    shape = _shape(index, len(selected), limits)
    announce(3 * shape[0] * shape[1] * len(selected))
    frames = _by_time(data, index, selected, shape) if index.times else None
    if frames is None:
        frames = _in_order(data, selected, shape)
    if len(frames) < len(selected):
        raise Undecodable("the video ends before its last frame")
    if len({frame.shape for frame in frames}) > 1:
        raise Undecodable("the frames of the video differ in size")
    return Video(np.stack(frames), index.fps, selected, index.count)


def sampled_frames(count: int, fps: float | None, io: Mapping[str, Any]) -> np.ndarray:
    """[n] int64, indices of the frames to take from `count` frames."""
    most, rate = int(io.get("num_frames", _FRAMES)), float(io.get("fps", -1))
    frames = count if most < 0 else min(most, count)
    if rate > 0 and fps:
        frames = min(frames, int(count / fps * rate))
    frames = max(frames, 1)
    return (
        np.arange(count) if frames == count else np.linspace(0, count - 1, frames).astype(np.int64)
    )


@frozen
class _Index:
    """Index of a video.

    Number of frames, frames per second, presentation times (ascending; empty if the file lacks
    them), times of the keyframes, width and height.
    """

    count: int
    fps: float | None
    times: Sequence[int]
    keys: Sequence[int]
    width: int
    height: int


def _indexed(container: Any) -> _Index:
    if not container.streams.video:
        raise Undecodable("it has no video")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise Undecodable("there is no decoder for its frames")
    times: list[int | None] = []
    keys: list[int] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        times.append(packet.pts)
        if packet.is_keyframe and packet.pts is not None:
            keys.append(packet.pts)
        if len(times) > _MOST:
            raise Undecodable(f"more than {_MOST} frames")
    shown_times = sorted(time for time in times if time is not None)
    complete = len(set(shown_times)) == len(times)
    if not times:
        raise Undecodable("it has no frames")
    rate = stream.average_rate or stream.guessed_rate
    if not rate and complete and shown_times[-1] > shown_times[0]:
        rate = (len(shown_times) - 1) / float((shown_times[-1] - shown_times[0]) * stream.time_base)
    fps = float(rate) if rate else None
    context = stream.codec_context
    sizes = (int(context.width), int(context.height))
    return _Index(len(times), fps, shown_times if complete else (), sorted(keys), *sizes)


def _shape(index: _Index, frames: int, limits: Limits) -> tuple[int, int]:
    """(width, height) of decoded frames, reduced if they would exceed the memory limit."""
    width, height = index.width, index.height
    if not width or not height or width * height > limits.pixels:
        raise Undecodable(f"frames of {width} x {height}: at most {limits.pixels} pixels")
    part = sqrt(limits.room / (frames * width * height * 3))
    if part >= 1:
        return width, height
    return max(int(width * part), 1), max(int(height * part), 1)


def _by_time(
    data: bytes, index: _Index, selected: np.ndarray, shape: tuple[int, int]
) -> list[np.ndarray] | None:
    """Decode frames by seeking to their times; None if the file does not allow it."""
    decoded: list[np.ndarray] = []
    with opened(data) as container:
        stream = container.streams.video[0]
        frames: Iterator[Any] = container.decode(stream)
        at: int | None = None
        for frame_index in selected:
            time = index.times[frame_index]
            key = bisect_right(index.keys, time) - 1
            if key >= 0 and at is not None and index.keys[key] > at:
                container.seek(index.keys[key], stream=stream)
                frames = container.decode(stream)
            for frame in frames:
                at = frame.pts
                if at is None or at >= time:
                    break
            else:
                break
            if at != time:
                return None
            decoded.append(_pixels(frame, shape))
    return decoded


def _in_order(data: bytes, selected: np.ndarray, shape: tuple[int, int]) -> list[np.ndarray]:
    """Decode frames by counting from the first."""
    decoded: list[np.ndarray] = []
    with opened(data) as container:
        for frame_index, frame in enumerate(container.decode(video=0)):
            if frame_index == selected[len(decoded)]:
                decoded.append(_pixels(frame, shape))
            if len(decoded) == len(selected):
                break
    return decoded


def _pixels(frame: Any, shape: tuple[int, int]) -> np.ndarray:
    """[height, width, 3] uint8, upright."""
    turns = round(frame.rotation / 90) % 4
    width, height = shape
    pixels: np.ndarray = frame.to_ndarray(format="rgb24", width=width, height=height)
    return np.rot90(pixels, turns) if turns else pixels
