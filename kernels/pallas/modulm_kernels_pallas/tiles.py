"""Divide a step's queries into tiles, on the host, with shapes that depend on its sizes only."""

from __future__ import annotations

import numpy as np
from attrs import frozen

__all__ = ["TILE", "Tiles", "tile_size", "tiles_of"]

#: Queries of one row that are computed together in steps with prompts.
TILE = 16


@frozen(eq=False)
class Tiles:
    """The queries of a step, up to `TILE` of one row in each tile.

    rows: [tiles] int32, the row of each tile. tokens: [tiles, size] int32, index in the step of
    each query, 0 for padding. positions: [tiles, size] int32, position of each query in its row, -1
    for padding. lengths: [tiles] int32, cached tokens of the row. first, last: [tiles] int32, the
    columns of the block table that some query sees; last < first in tiles that are all padding.
    places: [tokens] int32, index of each token among all queries of all tiles.
    """

    rows: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    last: np.ndarray
    places: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return all arrays, in the order in which kernels take them."""
        return (
            self.rows, self.tokens, self.positions, self.lengths, self.first, self.last,
            self.places,
        )  # fmt: skip


def tile_size(rows: int, tokens: int) -> int:
    """Return the queries of a tile: 1 in steps of one token per row."""
    return 1 if rows == tokens else TILE


def tiles_of(
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_size: int,
    *,
    causal: bool = True,
    window: int = 0,
) -> Tiles:
    """Divide a step: query_starts [rows + 1], context_lens [rows], as in `StepLayout`.

    The number of tiles is tokens / size, rounded up, plus the rows: enough for any lengths, so that
    steps with as many rows and tokens have equal shapes. causal: queries see no later keys. window:
    keys that a query sees, its own included; 0 for all.
    """
    starts = query_starts.astype(np.int64)
    counts, rows, tokens = np.diff(starts), len(context_lens), int(starts[-1])
    size = tile_size(rows, tokens)
    total = tokens if size == 1 else -(-tokens // size) + rows
    each = -(-counts // size)
    row = np.repeat(np.arange(rows), each)
    number = np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)
    offsets = number[:, None] * size + np.arange(size)
    valid = offsets < counts[row][:, None]
    shift = context_lens.astype(np.int64) - counts
    table = np.zeros((total, size), np.int32)
    positions = np.full((total, size), -1, np.int32)
    table[: len(row)] = np.where(valid, starts[row][:, None] + offsets, 0)
    positions[: len(row)] = np.where(valid, shift[row][:, None] + offsets, -1)
    lengths, first = np.zeros(total, np.int32), np.zeros(total, np.int32)
    last, owners = np.full(total, -1, np.int32), np.zeros(total, np.int32)
    owners[: len(row)], lengths[: len(row)] = row, context_lens[row]
    highest = positions[: len(row)].max(axis=1, initial=-1)
    end = highest if causal else lengths[: len(row)] - 1
    last[: len(row)] = end // block_size
    if window:
        lowest = positions[: len(row), 0] - window + 1
        first[: len(row)] = np.maximum(lowest, 0) // block_size
    places = np.zeros(tokens, np.int32)
    indices = np.arange(total * size).reshape(total, size)[: len(row)]
    places[table[: len(row)][valid]] = indices[valid]
    return Tiles(owners, table, positions, lengths, first, last, places)
