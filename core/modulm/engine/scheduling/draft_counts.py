"""How many drafted tokens a step verified, and how many of them were right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modulm.contracts.executor import StepResult
from modulm.engine.scheduling.row_table import RowTable
from modulm.engine.scheduling.step import StepInFlight

__all__ = ["DraftCounts", "draft_counts", "draft_statistics"]

#: Request -> how many of its drafted tokens a step verified, and how many of these were right.
DraftCounts = Mapping[str, tuple[int, int]]


def draft_counts(
    flight: StepInFlight, result: StepResult, table: RowTable
) -> dict[str, tuple[int, int]]:
    """The counts of a step, for the rows that are still there."""
    plan = flight.plan
    if plan.drafted is None or result.accepted is None:
        return {}
    alive = table.epoch[flight.sampled] == flight.epochs[plan.samples]
    counts = plan.drafted[plan.samples] * alive
    places = counts.nonzero()[0]
    right = np.maximum(result.accepted[places] - 1, 0)
    names = table.names[flight.sampled[places]].tolist()
    return dict(zip(names, zip(counts[places].tolist(), right.tolist(), strict=True), strict=True))


def draft_statistics(drafted: DraftCounts) -> dict[str, Any]:
    """The counts as fields of `StepStats`; none where nothing was drafted."""
    if not drafted:
        return {}
    counts, right = np.array(list(drafted.values())).T
    return {
        "drafted": int(counts.sum()),
        "accepted": int(right.sum()),
        "drafts": len(counts),
        "accepted_at": tuple(np.bincount(right)[:0:-1].cumsum()[::-1].tolist()),
    }
