"""Row table: the numbers of all running sequences, as arrays over stable row indices.

A sequence keeps its row from admission to release, so a decode step is a handful of vector
operations over the rows that run, however many they are.
"""

from __future__ import annotations

import numpy as np

from modulm.contracts.executor import PENDING
from modulm.contracts.requests import Request

__all__ = ["RowTable"]

_FIRST_WIDTH = 1024


class RowTable:
    """Structure of arrays; index by row.

    tokens: [rows, width] int32, widened on demand (pages that no row has touched cost nothing).
    computed: tokens whose keys and values exist once all planned steps have run. known: tokens
    known or planned to be sampled. limit: known tokens at which the row ends; least: known tokens
    below which stop ids do not end it. waiting: not to be planned, as something the row needs is
    under way. stops: [rows, n] int64 stop ids, padded with -2. epoch:
    counts the row's tenants, which tells a late result for an earlier one. names: request ids.
    """

    def __init__(self, rows: int, max_len: int) -> None:
        self.rows = rows
        self.max_len = max_len
        self.tokens = np.zeros((rows, min(max_len + 1, _FIRST_WIDTH)), dtype=np.int32)
        self.computed = np.zeros(rows, dtype=np.int64)
        self.known = np.zeros(rows, dtype=np.int64)
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
        """Rows without a sequence."""
        return len(self._free)

    @property
    def next_row(self) -> int:
        """The row that `admit` will give."""
        return self._free[-1]

    def admit(self, request: Request, history: np.ndarray, computed: int, limit: int) -> int:
        """Give the sequence a row. `history`: its tokens; `computed` of them need no work."""
        row = self._free.pop()
        self._widen(limit)
        self.tokens[row, : len(history)] = history
        self.computed[row] = computed
        self.known[row] = len(history)
        self.limit[row] = limit
        self.least[row] = request.least
        self._set_stops(row, request.stop_ids())
        self.names[row] = request.id
        return row

    def pause(self, row: int) -> None:
        """Do not plan the row until it is resumed or released."""
        self.paused.add(row)
        self.waiting[row] = True

    def resume(self, row: int) -> None:
        """Plan the row again."""
        self.paused.discard(row)
        self.waiting[row] = False

    def release(self, row: int) -> np.ndarray:
        """Take the row back; the tokens that are really known (none PENDING), as int64."""
        history = self.history(row)
        self.names[row] = None
        self.resume(row)
        self.epoch[row] += 1
        self._free.append(row)
        return history

    def history(self, row: int) -> np.ndarray:
        """The row's tokens as int64, without the ones that are planned but not sampled yet."""
        tokens = self.tokens[row, : self.known[row]].astype(np.int64)
        while len(tokens) and tokens[-1] == PENDING:
            tokens = tokens[:-1]
        return tokens

    def gather(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Tokens [start, start + count) of each row laid end to end: [sum(counts)] int64."""
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        columns = np.arange(total) + np.repeat(starts - ends + counts, counts)
        tokens: np.ndarray = self.tokens[np.repeat(rows, counts), columns].astype(np.int64)
        return tokens

    def stopped(self, rows: np.ndarray, tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[rows] bool: `tokens`, which make the rows `ends` long, end them by a stop id."""
        hits: np.ndarray = (self.stops[rows] == tokens[:, None]).any(axis=1)
        if hits.any():
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
        """Room for `limit` tokens and a pending one."""
        width = self.tokens.shape[1]
        if limit < width:
            return
        wider = np.zeros((self.rows, min(max(2 * width, limit + 1), self.max_len + 1)), np.int32)
        for row in range(self.rows):
            if self.names[row] is not None:
                wider[row, : self.known[row]] = self.tokens[row, : self.known[row]]
        self.tokens = wider
