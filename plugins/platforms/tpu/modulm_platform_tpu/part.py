"""Step part: counts compilations for the metrics of the engine."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

from modulm.contracts.step_part import PartPlanner, PartRunner, StepPart
from modulm_platform_tpu.hooks import runs_on_tpu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm.contracts.executor import PartReport, Plan
    from modulm.contracts.step_part import BuiltModel, PlannerContext

__all__ = ["CompilationsPart"]


class CompilationsPart(StepPart):
    """On for engines on TPUs."""

    name = "compilations"
    api = 1

    def __init__(self) -> None:
        self._runner: _CountingRunner | None = None

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self | None:
        return cls() if runs_on_tpu(config) else None

    def planner(self, context: PlannerContext) -> PartPlanner:
        return _CountingPlanner()

    def runner(self, built: BuiltModel) -> PartRunner:
        """Return the same runner for a model that is loaded again: it knows what it reported."""
        if self._runner is None:
            self._runner = _CountingRunner()
        return self._runner


class _CountingRunner(PartRunner):
    """Reports (compilations, seconds) of this process since the last report, if there were any.

    Those of the start are among the values that the engine describes itself with, which metrics
    begin with.
    """

    def __init__(self) -> None:
        from modulm_platform_tpu.compilations import COMPILATIONS

        self._counts = COMPILATIONS
        self._start = self._reported = COMPILATIONS.count, COMPILATIONS.seconds
        self._running = False

    def capacity(self) -> Mapping[str, Any]:
        now = self._counts.count, self._counts.seconds
        if not self._running:
            self._reported = now
        (count, seconds), (before, then) = now, self._start
        return {"counts": {"compilations": count - before, "compile_time": seconds - then}}

    def report(self) -> object | None:
        self._running = True
        count, seconds = self._reported
        if self._counts.count == count:
            return None
        self._reported = self._counts.count, self._counts.seconds
        return [self._reported[0] - count, self._reported[1] - seconds]


class _CountingPlanner(PartPlanner):
    """Passes counts on, with the events of the next step."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(float)

    def receive(self, plan: Plan, report: PartReport) -> None:
        compilations, seconds = report.value
        self._counts["compilations"] += compilations
        self._counts["compile_time"] += seconds

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        counts, self._counts = self._counts, defaultdict(float)
        return {"counts": dict(counts)} if counts else {}
