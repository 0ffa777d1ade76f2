"""Answers judged by Whisper's thresholds, and subtitles."""

from __future__ import annotations

import pytest

from modulm_speech.quality import Quality, compression_ratio
from modulm_speech.subtitles import srt, vtt
from modulm_speech.transcriber import Segment


@pytest.mark.parametrize(
    ("text", "logprobs", "no_speech", "failed", "silent"),
    [
        ("We choose to go to the moon.", [-0.1, -0.3], 0.0, False, False),
        ("and so on " * 40, [-0.1, -0.1], 0.0, True, False),
        ("We choose to go to the moon.", [-1.5, -0.9], 0.3, True, False),
        ("Thank you.", [-1.5, -0.9], 0.7, False, True),
        ("Thank you.", [-0.2, -0.2], 0.9, False, False),
        ("", [], 0.0, False, False),
    ],
)
def test_thresholds(text, logprobs, no_speech, failed, silent) -> None:
    quality = Quality.of(text, logprobs, no_speech)
    assert (quality.failed, quality.silent) == (failed, silent)


def test_what_repeats_itself_can_be_compressed() -> None:
    assert compression_ratio("") == 0
    assert compression_ratio("ha" * 200) > 10 > 2.4 > compression_ratio("We choose to go.")


SEGMENTS = (
    Segment(start=0.0, end=1.9999, text=" Ask not\nwhat"),
    Segment(start=3599.5, end=3601.25, text=" <b>a & b</b> --> c"),
)


def test_srt() -> None:
    assert srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:02,000\nAsk not what\n\n"
        "2\n00:59:59,500 --> 01:00:01,250\n<b>a & b</b> -> c\n\n"
    )
    assert srt(()) == ""


def test_vtt() -> None:
    assert vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nAsk not what\n\n"
        "00:59:59.500 --> 01:00:01.250\n&lt;b&gt;a &amp; b&lt;/b&gt; -&gt; c\n\n"
    )
