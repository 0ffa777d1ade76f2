"""Divide a step into tiles, on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

__all__ = ["MOST_MASKED", "bits_of_each", "prompt_tiles", "span_of_each", "split_tiles"]

#: New tokens of a row with a mask: one bit of a 64-bit integer each.
MOST_MASKED = 62


def prompt_tiles(starts: np.ndarray, rows: np.ndarray, tokens: int) -> np.ndarray:
    """Return [n, 3] int32 (row, first token, 0) for tiles of `tokens` tokens of these rows.

    The last tokens of a row attend to the most keys; their tiles come first, so that they do not
    finish last.
    """
    counts = (starts[1:] - starts[:-1])[rows]
    tiles = -(-counts // tokens)
    row = np.repeat(rows, tiles)
    number = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    table = np.stack([row, starts[row] + number * tokens, np.zeros_like(row)], 1)
    order = np.argsort(-number, kind="stable")
    ordered: np.ndarray = table[order].astype(np.int32)
    return ordered


def split_tiles(starts: np.ndarray, rows: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tiles of `tokens` tokens of these rows, and the indices of these rows' tokens.

    Tiles: [n, 3] int32 (row, first token, number of preceding tokens in `rows`). Indices: [tokens
    of `rows`] int32, positions in the step.
    """
    counts = (starts[1:] - starts[:-1])[rows]
    before = np.cumsum(counts) - counts
    tiles = -(-counts // tokens)
    owner = np.repeat(np.arange(len(rows)), tiles)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    shift = number * tokens
    table = np.stack([rows[owner], starts[rows[owner]] + shift, before[owner] + shift], 1)
    each = np.repeat(starts[rows] - before, counts) + np.arange(counts.sum())
    return table.astype(np.int32), each.astype(np.int32)


def span_of_each(spans: np.ndarray, starts: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
    """Return [tokens, 2] int32: first position and end of each token's span; 0, 0 without one.

    Raises ValueError for spans that overlap.
    """
    bounds = np.zeros((int(starts[-1]), 2), np.int32)
    for row, first, end in spans.tolist():
        shift = int(starts[row + 1]) - int(context_lens[row])
        part = bounds[max(shift + first, int(starts[row])) : shift + end]
        if part.any():
            raise ValueError(f"spans of row {row} overlap at position {first}")
        part[:] = first, end
    return bounds


def bits_of_each(
    masks: Mapping[int, np.ndarray], starts: np.ndarray, context_lens: np.ndarray
) -> np.ndarray:
    """Return [tokens, 2] int64: position of the row's first new token, and a bit for each new token
    that a token sees; -1, 0 for tokens of rows without a mask.

    Raises ValueError for rows with more than MOST_MASKED new tokens.
    """
    table = np.tile(np.array([-1, 0], np.int64), (int(starts[-1]), 1))
    for row, mask in masks.items():
        if mask.shape[1] > MOST_MASKED:
            raise ValueError(
                f"masks: row {row} has {mask.shape[1]} new tokens; the backend triton masks up to "
                f"{MOST_MASKED}; draft fewer, or use --attention-backend sdpa"
            )
        part = table[starts[row] : starts[row + 1]]
        part[:, 0] = context_lens[row] - mask.shape[1]
        part[:, 1] = mask.astype(np.int64) @ (1 << np.arange(mask.shape[1], dtype=np.int64))
    return table
