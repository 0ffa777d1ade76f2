"""A step between its launch and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm.contracts.executor import PartReport, StepResult
from modulm.engine.worker.verified import verified_of

if TYPE_CHECKING:
    from modulm.contracts.executor import Plan, RowFailure
    from modulm.contracts.step_part import Verified
    from modulm.engine.sampling.sampler import Best

__all__ = ["RunningStep"]


class RunningStep:
    """A step that is running, and its result so far.

    sampling: [rows] bool, the rows that sample tokens. gives: whether this rank returns them.
    verified: waits for them. scores: row -> prompt logprobs. reports: part -> its report.
    """

    def __init__(self, plan: Plan, began: float) -> None:
        self.plan = plan
        self.sampling = plan.samples
        self.gives = False
        self.verified: Callable[[], Verified] = partial(verified_of, None)
        self.scores: Mapping[int, Sequence[Best]] = {}
        self.reports: dict[str, Any] = {}
        self._began = began

    def report(self, hooks: Sequence[tuple[str, Any]], *arguments: Any) -> None:
        """Call methods of parts and record their reports."""
        for name, hook in hooks:
            if (value := hook(*arguments)) is not None:
                self.reports[name] = value

    def empty_result(self, rank: int) -> StepResult:
        """Build the result of a step without rows, or of a rank that returns no tokens."""
        return StepResult(
            self.plan.step, np.zeros(0, dtype=np.int64), parts=self._part_reports(rank)
        )

    def result(
        self,
        verified: Verified,
        failed: Mapping[int, RowFailure],
        *,
        rank: int,
        routed: np.ndarray | None,
    ) -> StepResult:
        """Build the result. failed: rows that failed in this step or before."""
        plan, sampling = self.plan, self.sampling
        rows = plan.rows[sampling].tolist()
        tokens, accepted = verified.tokens, verified.accepted
        errors = {row: failed[row] for row in plan.rows.tolist() if row in failed} if failed else {}
        if errors:
            alive = np.array([row not in errors for row in rows], dtype=bool)
            tokens, accepted = tokens[np.repeat(alive, accepted)], accepted * alive
        each = not errors and plan.drafted is None
        if sampling is not plan.samples:
            runs, accepted, each = accepted, np.zeros_like(plan.counts), False
            accepted[sampling] = runs
            accepted = accepted[plan.samples]
        return StepResult(
            step=plan.step,
            tokens=tokens,
            accepted=None if each else accepted,
            logprobs={
                rows[index]: entries
                for index, entries in verified.logprobs.items()
                if rows[index] not in errors
            },
            prompt_logprobs={
                row: tuple(entry for best in slices for _, entry in best.entries())
                for row, slices in self.scores.items()
            },
            errors=errors,
            unfinished=tuple(rows[index] for index in verified.unfinished),
            parts=self._part_reports(rank),
            routed=routed,
            seconds=time.perf_counter() - self._began,
        )

    def _part_reports(self, rank: int) -> tuple[PartReport, ...]:
        return tuple(PartReport(name, value, rank) for name, value in self.reports.items())
