"""Word timestamps: align tokens with audio frames, and group tokens into words.

Source: Radford et al., arXiv 2212.04356, and the code published with it; dynamic time warping is
due to Sakoe and Chiba (1978).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["UNSPACED", "end_frames", "group_words"]

#: Languages without spaces between words: each character counts as a word.
UNSPACED = frozenset({"ja", "lo", "my", "th", "yue", "zh"})
_BROKEN = "\ufffd"
_SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
#: Punctuation that belongs to the following word, and to the preceding one.
_OPENING = "\"'“¡¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"


def end_frames(weights: np.ndarray) -> np.ndarray:
    """Return [tokens] int: the frame at which each token ends.

    weights: [tokens, frames], large where a token is likely. The path runs monotonically from the
    first token and frame to the last ones and has the largest sum.
    """
    tokens, frames = weights.shape
    cost = np.full((tokens + 1, frames + 1), np.inf, np.float32)
    steps = np.empty((tokens + 1, frames + 1), np.int8)
    cost[0, 0] = 0
    flat, flat_steps = cost.ravel(), steps.ravel()
    price = -weights.astype(np.float64).ravel()
    wide = frames + 1
    for diagonal in range(2, tokens + frames + 1):
        # The cells (i, diagonal - i) of a diagonal are independent, and `frames` apart in memory.
        first, last = max(1, diagonal - frames), min(tokens, diagonal - 1)
        here = slice(first * frames + diagonal, last * frames + diagonal + 1, frames)
        both, token, frame = (
            flat[here.start - back : here.stop - back : frames] for back in (wide + 1, wide, 1)
        )
        # Ties advance in time.
        on_both = (both < token) & (both < frame)
        on_token = (token < both) & (token < frame)
        best = np.where(on_both, 0, np.where(on_token, 1, 2))
        before = np.where(on_both, both, np.where(on_token, token, frame))
        prices = price[(first - 1) * frames + diagonal - first - 1 :: frames - 1 or 1]
        flat[here] = prices[: last - first + 1] + before
        flat_steps[here] = best
    return _ends(steps)


def _ends(steps: np.ndarray) -> np.ndarray:
    """Return the frames at which the path first reaches each token."""
    i, j = steps.shape[0] - 1, steps.shape[1] - 1
    frames = np.zeros(i, np.int64)
    while i > 0:
        frames[i - 1], step = j - 1, steps[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return frames


def group_words(
    tokens: Sequence[int], decode: Callable[[list[int]], str], *, spaced: bool
) -> list[tuple[str, int, int]]:
    """Return (text, first token, end) of each word. spaced: words are separated by spaces."""
    parts = _characters(tokens, decode)
    grouped: list[tuple[str, int, int]] = []
    for text, first, end in parts:
        is_sign = text.strip() in _SIGNS
        if not grouped or not spaced or text.startswith(" ") or is_sign:
            grouped.append((text, first, end))
        else:
            before = grouped[-1]
            grouped[-1] = (before[0] + text, before[1], end)
    return _with_signs(grouped)


def _characters(
    tokens: Sequence[int], decode: Callable[[list[int]], str]
) -> list[tuple[str, int, int]]:
    """Return the shortest runs of tokens that decode to whole characters."""
    whole = decode(list(tokens))
    runs: list[tuple[str, int, int]] = []
    first = decoded = 0
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[first:end]))
        broken = text.find(_BROKEN)
        # A replacement character may be part of the text itself.
        if broken < 0 or whole[decoded + broken : decoded + broken + 1] in ("", _BROKEN):
            runs.append((text, first, end))
            first, decoded = end, decoded + len(text)
    return runs


def _with_signs(parts: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Attach punctuation to the word that it belongs to."""
    reversed_words: list[tuple[str, int, int]] = []
    for text, first, end in reversed(parts):
        opens = text.startswith(" ") and text.strip() in _OPENING
        if reversed_words and opens:
            after = reversed_words[-1]
            reversed_words[-1] = (text + after[0], first, after[2])
        else:
            reversed_words.append((text, first, end))
    merged: list[tuple[str, int, int]] = []
    for text, first, end in reversed(reversed_words):
        if merged and text in _CLOSING and not merged[-1][0].endswith(" "):
            before = merged[-1]
            merged[-1] = (before[0] + text, before[1], end)
        else:
            merged.append((text, first, end))
    return merged
