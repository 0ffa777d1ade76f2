"""Row table: state of all running sequences, as arrays over stable row indices.

A sequence keeps its row from admission to release, so that a decode step is a few vector
operations for any number of rows.
"""

from __future__ import annotations

import numpy as np

from modulm.contracts.executor import PENDING
from modulm.contracts.requests import Request

__all__ = ["RowTable"]

_FIRST_WIDTH = 1024


class RowTable:
    """Structure of arrays, indexed by row.

    tokens: [rows, width] int32, widened on demand. computed: number of tokens that will be computed
    once all planned steps have run. length: number of tokens known or planned to be sampled. limit:
    `length` at which the row ends. least: `length` below which stop ids do not end it. waiting:
    rows not to be planned. stops: [rows, n] int64 stop ids, padded with -2. epoch: how many
    requests have used the row, to recognize late results of earlier ones. names: request ids.
    """

    def __init__(self, rows: int, max_len: int) -> None:
        self.rows = rows
        self.max_len = max_len
        self.tokens = np.zeros((rows, min(max_len + 1, _FIRST_WIDTH)), dtype=np.int32)
        self.computed = np.zeros(rows, dtype=np.int64)
        self.length = np.zeros(rows, dtype=np.int64)
        self.limit = np.zeros(rows, dtype=np.int64)
        self.least = np.zeros(rows, dtype=np.int64)
        self.waiting = np.zeros(rows, dtype=np.bool_)
        self.stops = np.full((rows, 1), -2, dtype=np.int64)
        self.epoch = np.zeros(rows, dtype=np.int64)
        self.names = np.full(rows, None, dtype=object)
        #: Rows that step parts have paused: `waiting` is set for them.
        self.paused: set[int] = set()
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def next_row(self) -> int:
        """The row that `admit` will return."""
        return self._free[-1]

    def admit(self, request: Request, history: np.ndarray, computed: int, limit: int) -> int:
        """Assign a row. history: the sequence's tokens, of which `computed` are cached."""
        row = self._free.pop()
        self._widen(limit)
        self.tokens[row, : len(history)] = history
        self.computed[row] = computed
        self.length[row] = len(history)
        self.limit[row] = limit
        self.least[row] = request.least
        self._set_stops(row, request.stop_ids())
        self.names[row] = request.id
        return row

    def pause(self, row: int) -> None:
        """Leave the row out of steps until it is resumed or released."""
        self.paused.add(row)
        self.waiting[row] = True

    def resume(self, row: int) -> None:
        """Include the row in steps again."""
        self.paused.discard(row)
        self.waiting[row] = False

    def release(self, row: int) -> np.ndarray:
        """Free the row; return its known tokens as int64, without pending ones."""
        history = self.history(row)
        self.names[row] = None
        self.resume(row)
        self.epoch[row] += 1
        self._free.append(row)
        return history

    def history(self, row: int) -> np.ndarray:
        """Return the row's known tokens as int64, without pending ones."""
        tokens = self.tokens[row, : self.length[row]].astype(np.int64)
        while len(tokens) and tokens[-1] == PENDING:
            tokens = tokens[:-1]
        return tokens

    def gather(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Concatenate tokens [start, start + count) of each row: [sum(counts)] int64."""
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        columns = np.arange(total) + np.repeat(starts - ends + counts, counts)
        tokens: np.ndarray = self.tokens[np.repeat(rows, counts), columns].astype(np.int64)
        return tokens

    def stopped(self, rows: np.ndarray, tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return which tokens end their rows by a stop id: [rows] bool. ends: rows' new lengths."""
        hits: np.ndarray = (self.stops[rows] == tokens[:, None]).any(axis=1)
        if np.count_nonzero(hits):
            hits &= ends >= self.least[rows]
        return hits

    def _set_stops(self, row: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stops.shape[1]:
            wider = np.full((self.rows, len(ids)), -2, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = -2
        self.stops[row, : len(ids)] = ids

    def _widen(self, limit: int) -> None:
        """Widen `tokens` for `limit` tokens and a pending one."""
        width = self.tokens.shape[1]
        if limit < width:
            return
        wider = np.zeros((self.rows, min(max(2 * width, limit + 1), self.max_len + 1)), np.int32)
        for row in range(self.rows):
            if self.names[row] is not None:
                wider[row, : self.length[row]] = self.tokens[row, : self.length[row]]
        self.tokens = wider
