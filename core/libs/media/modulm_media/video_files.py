"""Files of video: some of their frames, evenly spread."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
from attrs import frozen

from modulm_media.containers import opened
from modulm_media.limits import Limits, Undecodable
from modulm_media.values import Video

__all__ = ["decode_video", "taken"]

#: Frames that are taken where nothing is said, as vLLM does.
_FRAMES = 32
#: Frames that a file may have: all its packets are looked at.
_MOST = 2_000_000


def decode_video(data: bytes, io: Mapping[str, Any], limits: Limits) -> Video:
    """Frames of the file's first video; io: `num_frames`, -1 for all, and `fps`, frames that are
    taken for each second, no more than `num_frames`.

    Raises Undecodable. Source: FFmpeg.
    """
    with opened(data) as container:
        index = _indexed(container)
    wanted = taken(index.count, index.fps, io)
    if len(wanted) > limits.frames:
        raise Undecodable(
            f"{len(wanted)} of {index.count} frames would be taken: at most {limits.frames} are; "
            "ask for fewer (num_frames, fps)"
        )
    shape = _shape(index, len(wanted), limits)
    frames = _by_time(data, index, wanted, shape) if index.times else None
    if frames is None:
        frames = _in_order(data, wanted, shape)
    if len(frames) < len(wanted):
        raise Undecodable("the video ends before its last frame")
    if len({frame.shape for frame in frames}) > 1:
        raise Undecodable("the video's frames are not of one size")
    return Video(np.stack(frames), index.fps, wanted, index.count)


def taken(count: int, fps: float | None, io: Mapping[str, Any]) -> np.ndarray:
    """[n] int64, which of `count` frames are taken."""
    most, rate = int(io.get("num_frames", _FRAMES)), float(io.get("fps", -1))
    found = count if most < 0 else min(most, count)
    if rate > 0 and fps:
        found = min(found, int(count / fps * rate))
    found = max(found, 1)
    return np.arange(count) if found == count else np.linspace(0, count - 1, found).astype(np.int64)


@frozen
class _Index:
    """A video's frames: how many, how many a second, when they are shown (ascending; none where the
    file does not say), the times of those that are decoded without others, and their size.
    """

    count: int
    fps: float | None
    times: Sequence[int]
    keys: Sequence[int]
    width: int
    height: int


def _indexed(container: Any) -> _Index:
    if not container.streams.video:
        raise Undecodable("there is no video in it")
    stream = container.streams.video[0]
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
    shown = sorted(time for time in times if time is not None)
    whole = len(set(shown)) == len(times)
    if not times:
        raise Undecodable("there are no frames in it")
    rate = stream.average_rate or stream.guessed_rate
    if not rate and whole and shown[-1] > shown[0]:
        rate = (len(shown) - 1) / float((shown[-1] - shown[0]) * stream.time_base)
    fps = float(rate) if rate else None
    context = stream.codec_context
    sizes = (int(context.width), int(context.height))
    return _Index(len(times), fps, shown if whole else (), sorted(keys), *sizes)


def _shape(index: _Index, frames: int, limits: Limits) -> tuple[int, int]:
    """(width, height) that frames are given, smaller than theirs where there is no room."""
    width, height = index.width, index.height
    if not width or not height or width * height > limits.pixels:
        raise Undecodable(f"frames of {width} x {height}: at most {limits.pixels} pixels")
    part = sqrt(limits.room / (frames * width * height * 3))
    if part >= 1:
        return width, height
    return max(int(width * part), 1), max(int(height * part), 1)


def _by_time(
    data: bytes, index: _Index, wanted: np.ndarray, shape: tuple[int, int]
) -> list[np.ndarray] | None:
    """The frames, found by their times; None where the file cannot be searched so."""
    found: list[np.ndarray] = []
    with opened(data) as container:
        stream = container.streams.video[0]
        frames: Iterator[Any] = container.decode(stream)
        at: int | None = None
        for place in wanted:
            time = index.times[place]
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
            found.append(_pixels(frame, shape))
    return found


def _in_order(data: bytes, wanted: np.ndarray, shape: tuple[int, int]) -> list[np.ndarray]:
    """The frames, counted from the first."""
    found: list[np.ndarray] = []
    with opened(data) as container:
        for place, frame in enumerate(container.decode(video=0)):
            if place == wanted[len(found)]:
                found.append(_pixels(frame, shape))
            if len(found) == len(wanted):
                break
    return found


def _pixels(frame: Any, shape: tuple[int, int]) -> np.ndarray:
    """[height, width, 3] uint8, upright."""
    turns = round(frame.rotation / 90) % 4
    width, height = shape
    pixels: np.ndarray = frame.to_ndarray(format="rgb24", width=width, height=height)
    return np.rot90(pixels, turns) if turns else pixels
