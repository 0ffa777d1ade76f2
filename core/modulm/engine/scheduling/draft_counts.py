"""Counts of drafted and accepted tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modulm.contracts.executor import StepResult
from modulm.engine.scheduling.row_table import RowTable
from modulm.engine.scheduling.step import StepInFlight

__all__ = ["DraftCounts", "draft_counts", "draft_statistics"]

#: Request -> (verified drafts, accepted drafts).
DraftCounts = Mapping[str, tuple[int, int]]


def draft_counts(
    flight: StepInFlight, result: StepResult, table: RowTable
) -> dict[str, tuple[int, int]]:
    """Return the counts of a step, for rows that still run."""
    plan = flight.plan
    if plan.drafted is None or result.accepted is None:
        return {}
    alive = table.epoch[flight.sampled] == flight.epochs[plan.samples]
    counts = plan.drafted[plan.samples] * alive
    places = counts.nonzero()[0]
    accepted = np.maximum(result.accepted[places] - 1, 0).tolist()
    names = table.names[flight.sampled[places]].tolist()
    return dict(zip(names, zip(counts[places].tolist(), accepted, strict=True), strict=True))


def draft_statistics(drafted: DraftCounts) -> dict[str, Any]:
    """Return the counts as fields of `StepStats`; {} if nothing was drafted."""
    if not drafted:
        return {}
    counts, accepted = np.array(list(drafted.values())).T
    return {
        "drafted": int(counts.sum()),
        "accepted": int(accepted.sum()),
        "drafts": len(counts),
        "accepted_at": tuple(np.bincount(accepted)[:0:-1].cumsum()[::-1].tolist()),
    }
