"""Sound of any length to pieces that a model takes, cut where it is quiet."""

from __future__ import annotations

import numpy as np

__all__ = ["is_silent", "pieces"]

#: Seconds at the end of a piece in which the quietest place is looked for, of the window that is
#: heard as one, and of the shortest piece that is left behind a cut.
_LOOK, _WINDOW, _LEAST = 5.0, 0.1, 0.5
#: Below this nothing can be heard: -80 dB of full scale.
_QUIET = 1e-4


def pieces(samples: np.ndarray, rate: int, longest: float) -> list[tuple[int, int]]:
    """(first, end) of the pieces of a sound, [n] samples, in order and without gaps.

    None lasts longer than `longest` seconds. Cuts are in the middle of the quietest tenth of a
    second of the last five seconds that a piece could have.
    """
    most, found, at = int(longest * rate), [], 0
    while len(samples) - at > most:
        end = min(at + most, len(samples) - int(_LEAST * rate))
        first = max(at + 1, end - int(min(_LOOK, longest / 2) * rate))
        cut = first + _quietest(samples[first:end], rate)
        found.append((at, cut))
        at = cut
    found.append((at, len(samples)))
    return found


def is_silent(samples: np.ndarray) -> bool:
    """Whether there is nothing to hear."""
    return not len(samples) or float(np.abs(samples).max()) < _QUIET


def _quietest(samples: np.ndarray, rate: int) -> int:
    """The middle of the window with the least energy, the last one where several have it."""
    window = max(1, int(_WINDOW * rate))
    if len(samples) <= window:
        return len(samples)
    sums = np.cumsum(np.square(samples, dtype=np.float64))
    energy = np.concatenate([[sums[window - 1]], sums[window:] - sums[:-window]])
    # Sums that differ by rounding only are equal.
    near = energy <= energy.min() + 1e-9 * window
    return int(np.flatnonzero(near)[-1]) + window // 2
