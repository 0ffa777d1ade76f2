"""Pause an engine between two steps: rows keep their state, and nothing is scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from modulm.contracts.executor import Plan

if TYPE_CHECKING:
    from modulm.engine.core.engine_core import EngineCore

__all__ = ["hold", "release"]

_IDLE = Plan(
    step=-1,
    rows=np.zeros(0, np.int32),
    starts=np.zeros(0, np.int32),
    counts=np.zeros(0, np.int32),
    tokens=np.zeros(0, np.int64),
    tables=(),
    samples=np.zeros(0, bool),
)


class _Held:
    """A scheduler that plans nothing and delegates everything else."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def plan(self) -> Plan:
        """Return an empty plan."""
        return _IDLE


def hold(core: EngineCore) -> None:
    """Stop scheduling; steps in flight are finished."""
    if not isinstance(core.loop.scheduler, _Held):
        held: Any = _Held(core.loop.scheduler)
        core.loop.scheduler = held


def release(core: EngineCore) -> None:
    """Resume scheduling."""
    held: Any = core.loop.scheduler
    if isinstance(held, _Held):
        core.loop.scheduler = held.scheduler
