"""Logs each step of the engine, with `--enable-logging-iteration-details`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from modulm.plugins import hookimpl
from modulm_hooks_step_log.flags import StepLogConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.requests import StepStats

__all__ = ["StepLog", "step_log"]

log = logging.getLogger("modulm.steps")


class StepLog:
    """The hook plugin; off until an engine of this process starts with the flag."""

    def __init__(self) -> None:
        self._enabled = False

    @hookimpl
    def modulm_engine_started(self, config: EngineConfig) -> None:
        self._enabled = config.group(StepLogConfig).enable_logging_iteration_details

    @hookimpl
    def modulm_step_finished(self, stats: StepStats) -> None:
        if self._enabled:
            log.info("%s", line(stats))


def line(stats: StepStats) -> str:
    """Describe a step in one line."""
    parts = [
        f"step {stats.step}: {stats.computed} tokens computed",
        f"{stats.generated} generated",
        f"{stats.running} requests running",
        f"{stats.waiting} waiting",
    ]
    if stats.drafted:
        parts.append(f"{stats.accepted} of {stats.drafted} drafts accepted")
    if stats.preempted:
        parts.append(f"{stats.preempted} preempted")
    times = f"{stats.run_seconds * 1e3:.1f} ms, planning {stats.plan_seconds * 1e3:.1f} ms"
    return f"{', '.join(parts)}, {stats.usage:.0%} of the KV cache in use, {times}"


step_log = StepLog()
