"""When words are said: a path through a matrix of tokens and frames, and tokens put together.

Source: Radford et al., arXiv 2212.04356, and the program published with it; dynamic time warping is
Sakoe and Chiba's (1978).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["UNSPACED", "ends_of", "joined"]

#: Languages whose words are not parted by spaces: their characters are words.
UNSPACED = frozenset({"ja", "lo", "my", "th", "yue", "zh"})
_BROKEN = "\ufffd"
_SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
#: Signs that belong to the word behind them, and to the one before them.
_OPENING = "\"'“¡¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"


def ends_of(found: np.ndarray) -> np.ndarray:
    """[tokens] int: the frame at which each token has been said.

    found: [tokens, frames], large where a token is likely. The path goes from the first token and
    frame to the last ones and never back, and has the largest sum.
    """
    tokens, frames = found.shape
    cost = np.full((tokens + 1, frames + 1), np.inf, np.float32)
    came = np.empty((tokens + 1, frames + 1), np.int8)
    cost[0, 0] = 0
    flat, way = cost.ravel(), came.ravel()
    price = -found.astype(np.float64).ravel()
    wide = frames + 1
    for diagonal in range(2, tokens + frames + 1):
        # Its places do not depend on each other: (i, diagonal - i), `frames` apart in memory.
        first, last = max(1, diagonal - frames), min(tokens, diagonal - 1)
        here = slice(first * frames + diagonal, last * frames + diagonal + 1, frames)
        both, token, frame = (
            flat[here.start - back : here.stop - back : frames] for back in (wide + 1, wide, 1)
        )
        # Where two ways cost the same, time goes on.
        on_both = (both < token) & (both < frame)
        on_token = (token < both) & (token < frame)
        best = np.where(on_both, 0, np.where(on_token, 1, 2))
        before = np.where(on_both, both, np.where(on_token, token, frame))
        prices = price[(first - 1) * frames + diagonal - first - 1 :: frames - 1 or 1]
        flat[here] = prices[: last - first + 1] + before
        way[here] = best
    return _ends(came)


def _ends(came: np.ndarray) -> np.ndarray:
    """The frames at which the path first comes to each token."""
    i, j = came.shape[0] - 1, came.shape[1] - 1
    found = np.zeros(i, np.int64)
    while i > 0:
        found[i - 1], step = j - 1, came[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return found


def joined(
    tokens: Sequence[int], decode: Callable[[list[int]], str], *, spaced: bool
) -> list[tuple[str, int, int]]:
    """(text, first token, end) of each word; spaced: words are parted by spaces."""
    parts = _characters(tokens, decode)
    words: list[tuple[str, int, int]] = []
    for text, first, end in parts:
        alone = text.strip() in _SIGNS
        if not words or not spaced or text.startswith(" ") or alone:
            words.append((text, first, end))
        else:
            before = words[-1]
            words[-1] = (before[0] + text, before[1], end)
    return _with_signs(words)


def _characters(
    tokens: Sequence[int], decode: Callable[[list[int]], str]
) -> list[tuple[str, int, int]]:
    """The shortest runs of tokens that are whole characters."""
    whole = decode(list(tokens))
    found: list[tuple[str, int, int]] = []
    first = told = 0
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[first:end]))
        broken = text.find(_BROKEN)
        # A mark of a broken character may be what was meant.
        if broken < 0 or whole[told + broken : told + broken + 1] in ("", _BROKEN):
            found.append((text, first, end))
            first, told = end, told + len(text)
    return found


def _with_signs(words: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Signs are put to the word that they belong to."""
    behind: list[tuple[str, int, int]] = []
    for text, first, end in reversed(words):
        opens = text.startswith(" ") and text.strip() in _OPENING
        if behind and opens:
            after = behind[-1]
            behind[-1] = (text + after[0], first, after[2])
        else:
            behind.append((text, first, end))
    found: list[tuple[str, int, int]] = []
    for text, first, end in reversed(behind):
        if found and text in _CLOSING and not found[-1][0].endswith(" "):
            before = found[-1]
            found[-1] = (before[0] + text, before[1], end)
        else:
            found.append((text, first, end))
    return found
