"""Tracks which tokens a drafter has computed, if it does not compute all of them.

Rows reuse blocks that other rows filled. Whether the drafter has filled a block as well is tracked
by block; it is reset when the target writes the block's first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from modulm.contracts.drafter import Runs

__all__ = ["Computed"]


class Computed:
    """The tokens in a drafter's caches by row, and the full blocks that it has computed."""

    def __init__(self) -> None:
        self._full = np.ones(1, dtype=bool)  # block 0 stands for those that nobody looks at
        self._counts: dict[int, int] = {}
        self._marked: dict[int, int] = {}

    def release(self, row: int) -> None:
        """Forget the row."""
        self._counts.pop(row, None)
        self._marked.pop(row, None)

    def ran(self, runs: Runs, table: np.ndarray, size: int) -> None:
        """Record runs of the target. table: [rows, blocks], blocks of `size` tokens."""
        highest = int(table.max(initial=0))
        if highest >= len(self._full):
            self._full = np.append(self._full, np.zeros(highest + 1 - len(self._full), dtype=bool))
        starts = np.asarray(runs.starts)
        rows = runs.rows.tolist()
        for index in [at for at, row in enumerate(rows) if row not in self._counts]:
            filled = self._full[table[index, : starts[index] // size]]
            full = len(filled) if filled.all() else int(filled.argmin())
            self._counts[rows[index]] = full * size
            self._marked[rows[index]] = full
        first, end = -(-starts // size), (starts + runs.counts - 1) // size + 1
        for index in np.flatnonzero(first < end).tolist():
            self._full[table[index, first[index] : end[index]]] = False
        self._full[0] = True

    def count(self, row: int, known: int) -> int:
        """Return how many of the row's first `known - 1` tokens are computed."""
        return min(self._counts.get(row, 0), known - 1)

    def cut(self, row: int, count: int) -> None:
        """Forget what is computed behind the row's first `count` tokens."""
        if count < self._counts.get(row, 0):
            self._counts[row] = count

    def put(self, row: int, count: int, known: int, table: np.ndarray, size: int) -> None:
        """Record that `count` tokens of the row are computed, of which `known` are not drafts."""
        self._counts[row] = count
        full, marked = min(count, known - 1) // size, self._marked.get(row, 0)
        if full > marked:
            self._full[table[marked:full]] = True
            self._marked[row] = full
