"""Admission: how much of a step's budget each waiting request gets."""

from __future__ import annotations

from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.request_queue import Entry

__all__ = ["Admission"]


class Admission:
    """Divides the token budget that running rows left over.

    left: tokens. unfinished: lengths of running rows' unfinished prompts. unit: prompts are split
    at multiples of this. patient: a prompt waits until a whole unit fits.
    """

    def __init__(
        self, limits: Limits, left: int, unfinished: list[int], unit: int, patient: bool
    ) -> None:
        self.left, self._unit, self._patient, self._limits = left, unit, patient, limits
        self._partial = len(unfinished)
        self._long = sum(tokens > limits.long for tokens in unfinished)

    def portion(self, entry: Entry, missing: int) -> int | None:
        """Return how many of the `missing` tokens to compute.

        0: skip this request. None: admit no more requests in this step.
        """
        limits = self._limits
        if not limits.chunked:
            return missing if missing <= self.left else None
        count = min(missing, self.left, limits.long or missing)
        if count == missing:
            return count
        if self._patient and count < self._unit:
            return 0
        count = count - count % self._unit or count
        if limits.partial is not None and self._partial >= limits.partial:
            return 0
        many = limits.long_partial is not None and self._long >= limits.long_partial
        return 0 if many and limits.long and entry.tokens > limits.long else count

    def take(self, entry: Entry, count: int, missing: int) -> None:
        """Record that the request was admitted with `count` of the `missing` tokens."""
        self.left -= count
        if count < missing:
            self._partial += 1
            self._long += entry.tokens > self._limits.long
