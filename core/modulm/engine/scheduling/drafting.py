"""Drafted tokens: what a drafter proposed for each row, and which rows wait for their result.

With a drafter a row is not planned again before its last result is in, as its drafts come with
it. Drafts never cost a row its own token: they take what is left of the budget and of the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modulm.contracts.executor import Capacity, StepResult
from modulm.engine.kv_cache.manager import KVCacheManager
from modulm.engine.scheduling.row_table import RowTable
from modulm.engine.scheduling.step import NextStep, StepInFlight

__all__ = ["Drafting", "Verified", "drafting_figures", "verified"]

#: request -> how many of its drafted tokens a step verified, and how many of these were right
Verified = Mapping[str, tuple[int, int]]


def verified(
    flight: StepInFlight, result: StepResult, table: RowTable
) -> dict[str, tuple[int, int]]:
    """What became of the drafts of a step, for the rows that are still there."""
    plan = flight.plan
    if plan.drafted is None or result.accepted is None:
        return {}
    alive = table.epoch[flight.sampled] == flight.epochs[plan.samples]
    counts = plan.drafted[plan.samples] * alive
    places = counts.nonzero()[0]
    right = np.maximum(result.accepted[places] - 1, 0)
    names = table.names[flight.sampled[places]].tolist()
    return dict(zip(names, zip(counts[places].tolist(), right.tolist(), strict=True), strict=True))


def drafting_figures(drafted: Verified) -> dict[str, Any]:
    """The same as fields of `StepStats`; none where nothing was drafted."""
    if not drafted:
        return {}
    counts, right = np.array(list(drafted.values())).T
    return {
        "drafted": int(counts.sum()),
        "accepted": int(right.sum()),
        "drafts": len(counts),
        "accepted_at": tuple(np.bincount(right)[:0:-1].cumsum()[::-1].tolist()),
    }


class Drafting:
    """most: drafts that a row may have in a step, 0 without a drafter."""

    def __init__(self, capacity: Capacity, table: RowTable, cache: KVCacheManager) -> None:
        self.most = capacity.drafts
        self._ahead = capacity.ahead
        self._vocabulary = capacity.vocabulary
        self._table = table
        self._cache = cache
        self._counts = np.zeros(table.rows, dtype=np.int64)
        self._tokens = np.zeros((table.rows, self.most), dtype=np.int32)

    def propose(self, drafts: Mapping[int, np.ndarray], rows: np.ndarray) -> None:
        """Keep what was proposed for those of `rows`, up to a token that does not exist."""
        alive = set(rows.tolist())
        for row, proposed in drafts.items():
            if row not in alive:
                continue
            tokens = np.asarray(proposed)[: self.most]
            wrong = np.flatnonzero((tokens < 0) | (tokens >= self._vocabulary))
            count = int(wrong[0]) if len(wrong) else len(tokens)
            self._counts[row] = count
            self._tokens[row, :count] = tokens[:count]

    def release(self, row: int) -> None:
        """The row is gone."""
        self._counts[row] = 0

    def add(self, step: NextStep, left: int) -> None:
        """Give the step's decoding rows their drafts; `left`: tokens left of the budget."""
        self._add(step, left)
        if self._ahead:
            ends = step.starts + step.counts + self._ahead
            if step.drafted is not None:
                ends = ends + step.drafted
            self._cache.reserve(step.rows, np.minimum(ends, self._table.limit[step.rows]))

    def _add(self, step: NextStep, left: int) -> None:
        table, rows = self._table, step.rows
        known = table.known[rows]
        decodes = (step.counts == 1) & (step.starts + 1 == known)
        wanted = np.where(decodes, self._counts[rows], 0)
        wanted = np.clip(table.limit[rows] - known - 1, 0, wanted)
        wanted = np.clip(left - (np.cumsum(wanted) - wanted), 0, wanted)
        if wanted.any() and not self._cache.grow(rows, step.starts + step.counts + wanted):
            wanted = np.clip(self._cache.room(rows) - known, 0, wanted)
        if wanted.any():
            wanted, step.state_slots = self._cache.lend(rows, wanted, step.starts)
        self._counts[rows[decodes]] = 0
        if not wanted.any():
            step.state_slots = ()
            return
        owners = np.repeat(rows, wanted)
        ramp = np.arange(len(owners)) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        table.tokens[owners, np.repeat(known, wanted) + ramp] = self._tokens[owners, ramp]
        step.drafted = wanted
        step.one_each = False
