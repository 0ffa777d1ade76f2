"""Sound cut at pauses, and turns told by loudness."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from modulm_speech.cutting import is_silent, pieces
from modulm_speech.turns import TurnDetector

RATE = 1000


def noise(seconds: float, level: float = 0.3) -> np.ndarray:
    samples = np.random.default_rng(0).uniform(-level, level, int(seconds * RATE))
    return samples.astype(np.float32)


def test_cuts_are_in_the_middle_of_pauses() -> None:
    sound = noise(70)
    for pause in (27.0, 53.5):
        sound[int(pause * RATE) : int((pause + 0.4) * RATE)] = 0
    spans = pieces(sound, RATE, 30.0)
    assert [end / RATE for _, end in spans[:-1]] == pytest.approx([27.35, 53.85], abs=0.06)
    assert spans[-1][1] == len(sound)


@pytest.mark.parametrize("seconds", [0.3, 29.9, 30.0, 30.05, 61.0, 305.0])
def test_pieces_are_the_whole_and_none_is_too_long(seconds: float) -> None:
    sound = noise(seconds)
    spans = pieces(sound, RATE, 30.0)
    assert spans[0][0] == 0
    assert spans[-1][1] == len(sound)
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    assert all(0 < end - first <= 30 * RATE for first, end in spans)
    assert len(spans) == 1 or min(end - first for first, end in spans) >= RATE // 2
    assert (len(spans) == 1) == (seconds <= 30)


def test_silence_of_a_file_is_silence() -> None:
    assert is_silent(np.zeros(0, np.float32))
    assert is_silent(np.full(100, 3e-5, np.float32))
    assert not is_silent(noise(0.1))
    assert pieces(np.zeros(61 * RATE, np.float32), RATE, 30.0)[-1][1] == 61 * RATE


@pytest.mark.parametrize("size", [7, 160, 100_000])
def test_turns_begin_and_end_however_the_sound_comes(size: int) -> None:
    sound = np.concatenate([np.zeros(1000), noise(1), np.zeros(300), noise(1), np.zeros(2000)])
    detector = TurnDetector(RATE, silence=0.5, padding=0.3)
    turns = []
    for at in range(0, len(sound), size):
        turns += detector.feed(sound[at : at + size].astype(np.float32))
    assert turns == [("started", 700), ("stopped", 3800)]


def test_a_threshold_is_a_loudness() -> None:
    quiet = noise(1, 0.008)
    assert list(TurnDetector(RATE, threshold=0.5).feed(quiet)) == []
    assert list(TurnDetector(RATE, threshold=0.2).feed(quiet)) == [("started", 0)]
