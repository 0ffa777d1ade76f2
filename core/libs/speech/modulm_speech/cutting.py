"""Split audio of any length at quiet points into pieces that a model accepts."""

from __future__ import annotations

import numpy as np

__all__ = ["is_silent", "pieces"]

#: In seconds: the span at the end of a piece that is searched for a quiet point, the window whose
#: loudness is measured, and the shortest piece that may remain after a cut.
_LOOK, _WINDOW, _LEAST = 5.0, 0.1, 0.5
#: Peak amplitude below which audio counts as silent: -80 dB of full scale.
_QUIET = 1e-4


def pieces(samples: np.ndarray, rate: int, longest: float) -> list[tuple[int, int]]:
    """Return (first, end) sample indices of consecutive pieces that cover the audio.

    No piece is longer than `longest` seconds. Cuts are in the middle of the quietest tenth of a
    second within the last five seconds of the longest possible piece.
    """
    most, spans, at = int(longest * rate), [], 0
    while len(samples) - at > most:
        end = min(at + most, len(samples) - int(_LEAST * rate))
        first = max(at + 1, end - int(min(_LOOK, longest / 2) * rate))
        cut = first + _quietest(samples[first:end], rate)
        spans.append((at, cut))
        at = cut
    spans.append((at, len(samples)))
    return spans


def is_silent(samples: np.ndarray) -> bool:
    """Whether the audio is inaudible."""
    return not len(samples) or float(np.abs(samples).max()) < _QUIET


def _quietest(samples: np.ndarray, rate: int) -> int:
    """Return the middle of the window with the least energy; of equal windows, the last."""
    window = max(1, int(_WINDOW * rate))
    if len(samples) <= window:
        return len(samples)
    sums = np.cumsum(np.square(samples, dtype=np.float64))
    energy = np.concatenate([[sums[window - 1]], sums[window:] - sums[:-window]])
    # Sums that differ only by rounding count as equal.
    near = energy <= energy.min() + 1e-9 * window
    return int(np.flatnonzero(near)[-1]) + window // 2
