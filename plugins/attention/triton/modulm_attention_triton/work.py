"""How a step is cut into tiles, on the host."""

from __future__ import annotations

import numpy as np

__all__ = ["prompt_tiles", "span_of_each", "split_tiles"]


def prompt_tiles(starts: np.ndarray, rows: np.ndarray, tokens: int) -> np.ndarray:
    """[n, 3] int32 (row, first token, 0) for tiles of `tokens` of these rows.

    The last tokens of a row, which see the most, come first, so that they do not end last.
    """
    counts = (starts[1:] - starts[:-1])[rows]
    tiles = -(-counts // tokens)
    row = np.repeat(rows, tiles)
    number = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    made = np.stack([row, starts[row] + number * tokens, np.zeros_like(row)], 1)
    order = np.argsort(-number, kind="stable")
    found: np.ndarray = made[order].astype(np.int32)
    return found


def split_tiles(starts: np.ndarray, rows: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """[n, 3] int32 (row, first token, how many tokens of `rows` come before) for tiles of `tokens`
    of these rows; and [their tokens] int32, the places of these in the step.
    """
    counts = (starts[1:] - starts[:-1])[rows]
    before = np.cumsum(counts) - counts
    tiles = -(-counts // tokens)
    place = np.repeat(np.arange(len(rows)), tiles)
    number = np.arange(len(place)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    shift = number * tokens
    made = np.stack([rows[place], starts[rows[place]] + shift, before[place] + shift], 1)
    each = np.repeat(starts[rows] - before, counts) + np.arange(counts.sum())
    return made.astype(np.int32), each.astype(np.int32)


def span_of_each(spans: np.ndarray, starts: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
    """[tokens, 2] int32: first position and end of the span that a token of the step is in, or 0
    and 0. Raises ValueError for spans that overlap.
    """
    found = np.zeros((int(starts[-1]), 2), np.int32)
    for row, first, end in spans.tolist():
        shift = int(starts[row + 1]) - int(context_lens[row])
        part = found[max(shift + first, int(starts[row])) : shift + end]
        if part.any():
            raise ValueError(f"spans of row {row} overlap at position {first}")
        part[:] = first, end
    return found
