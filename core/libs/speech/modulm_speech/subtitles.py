"""Segments as subtitles: SubRip (.srt) and WebVTT (.vtt)."""

from __future__ import annotations

from collections.abc import Sequence

from modulm_speech.transcriber import Segment

__all__ = ["srt", "vtt"]

#: Characters with a meaning in WebVTT.
_ESCAPED = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def srt(segments: Sequence[Segment]) -> str:
    """Format segments as SubRip."""
    return "".join(
        f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_line(one.text)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """Format segments as WebVTT. Source: WebVTT, section 4 (cue text is escaped)."""
    parts = ["WEBVTT\n\n"]
    for one in segments:
        text = "".join(_ESCAPED.get(each, each) for each in _line(one.text))
        parts.append(f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{text}\n\n")
    return "".join(parts)


def _time(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    total = round(seconds * 1000)
    minutes, rest = divmod(total, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _line(text: str) -> str:
    """One line without arrows, which would start another cue."""
    return " ".join(text.split()).replace("-->", "->")
