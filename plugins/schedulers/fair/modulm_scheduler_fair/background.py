"""Background requests: those with a priority above 0 make room for the first tokens of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

if TYPE_CHECKING:
    from modulm.contracts.policy import Candidate

__all__ = ["Background"]

#: Consecutive steps that leave out background rows; the step after them runs these.
_HELD = 16
#: Steps after the last other request for which background prompts are computed in small chunks,
#: and the part of a step's budget that a chunk has.
_RECENT, _PART = 1024, 8


@define(eq=False)
class Background:
    """Follows which requests are in the background, and which others have no token yet.

    While another request waits for its first token, steps leave out background rows, and none is
    admitted: at most `_HELD` steps in a row. A step in flight cannot be undone, so background
    prompts are computed in chunks of an eighth of a step's budget while others have been there.
    """

    #: Other requests that have not ended, and those of them that have no token yet.
    _others: set[str] = field(factory=set)
    _tokenless: set[str] = field(factory=set)
    #: Rows of background requests, and of others.
    _rows: set[int] = field(factory=set)
    _other_rows: set[int] = field(factory=set)
    _steps_held: int = 0
    _recent: int = 0

    @staticmethod
    def has(request: Candidate) -> bool:
        """Whether a request is in the background."""
        return request.priority > 0

    @property
    def waits(self) -> bool:
        """Whether background requests make room in the step that is planned next."""
        return bool(self._tokenless) and self._steps_held < _HELD

    @property
    def running(self) -> bool:
        """Whether any request has a row."""
        return bool(self._rows or self._other_rows)

    def chunk(self, budget: int, unit: int) -> int | None:
        """Return the prompt tokens of background requests in a step; None: no limit.

        unit: prompts are split at multiples of this.
        """
        if not self._recent:
            return None
        tokens = max(budget // _PART, 1)
        return max(tokens - tokens % unit, unit)

    def arrived(self, request: Candidate) -> None:
        """Note a request that is queued, also one that returns to the queue."""
        if not self.has(request) and request.id not in self._others:
            self._others.add(request.id)
            self._tokenless.add(request.id)

    def admitted(self, request: Candidate, row: int) -> None:
        """Note the row of a request."""
        (self._rows if self.has(request) else self._other_rows).add(row)

    def released(self, row: int) -> None:
        """Forget a row."""
        self._rows.discard(row)
        self._other_rows.discard(row)

    def sampled(self, requests: np.ndarray) -> None:
        """Note the requests that get a token in the planned step."""
        if self._tokenless:
            self._tokenless.difference_update(requests.tolist())

    def finished(self, request: str) -> None:
        """Forget a request."""
        self._others.discard(request)
        self._tokenless.discard(request)

    def shorten(self, rows: np.ndarray, counts: np.ndarray, most: int | None) -> int:
        """Leave background rows out of a step if they make room, or bound their prompts' tokens.

        One row stays if no other has tokens to compute, if possible one that decodes: others that
        wait may need what it has, such as an adapter's slot. most: prompt tokens of background
        rows; None: no limit. Returns how many of these the step has.
        """
        chosen = np.fromiter((row in self._rows for row in rows.tolist()), np.bool_, len(rows))
        places = np.flatnonzero(chosen & (counts > 0))
        if not len(places):
            return 0
        if self.waits:
            alone = not counts[~chosen].any()
            spared = places[np.argmin(counts[places] > 1)]
            count = int(counts[spared]) if most is None else min(int(counts[spared]), 1 + most)
            counts[places] = 0
            counts[spared] = count if alone else 0
        elif most is not None:
            more = counts[places] - 1
            counts[places] = 1 + np.clip(most - (np.cumsum(more) - more), 0, more)
        return int((counts[places] - 1).clip(0).sum())

    def planned(self) -> None:
        """Count a planned step."""
        self._steps_held = self._steps_held + 1 if self.waits else 0
        self._recent = _RECENT if self._others else max(self._recent - 1, 0)
