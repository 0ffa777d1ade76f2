"""An engine without a front end, for tests of schedulers, policies and executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from attrs import define, field

from modulm.config import EngineConfig
from modulm.contracts.connector import KVConnector
from modulm.contracts.executor import Executor
from modulm.contracts.policy import Candidate, Policy
from modulm.contracts.requests import Finish, Request, StepEvents, StepStats
from modulm.contracts.step_part import StepPart
from modulm.engine.core.loop import EngineLoop
from modulm.engine.kv_cache.block_pool import NULL, BlockPool
from modulm.engine.parts import open_parts
from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.errors import EngineDead, EngineError
from modulm.plugins import manager

__all__ = [
    "ByArrival",
    "Recorder",
    "check_empty",
    "free_blocks",
    "make_engine",
    "run_to_end",
    "step_parts",
]


class ByArrival(Policy):
    """First come, first served, without a package."""

    name: ClassVar[str] = "by-arrival"
    api: ClassVar[int | tuple[int, int]] = 1

    def key(self, request: Candidate) -> float:
        return request.arrival

    def victim(self, running: Sequence[Candidate]) -> int:
        return max(range(len(running)), key=lambda i: (running[i].arrival, i))


@define(eq=False)
class Recorder:
    """A listener that keeps everything it is told."""

    tokens: dict[str, list[int]] = field(factory=dict)
    finished: dict[str, Finish] = field(factory=dict)
    cached: dict[str, int] = field(factory=dict)
    stats: list[StepStats] = field(factory=list)
    steps: list[StepEvents] = field(factory=list)
    death: EngineDead | None = None

    def events(self, events: StepEvents) -> None:
        self.steps.append(events)
        for start in events.started:
            self.cached[start.request] = start.cached
        for request, token in zip(events.requests, events.tokens, strict=True):
            if request in self.finished:
                raise EngineError(f"{request} got a token after its end")
            self.tokens.setdefault(request, []).append(token)
        for finish in events.finished:
            if finish.request in self.finished:
                raise EngineError(f"{finish.request} ended twice")
            self.finished[finish.request] = finish
        if events.stats is not None:
            self.stats.append(events.stats)

    def died(self, error: EngineDead) -> None:
        self.death = error


def _silent(hook: str, **arguments: Any) -> None:
    """No hooks."""


def make_engine(
    executor: Executor,
    limits: Limits | None = None,
    policy: Policy | None = None,
    depth: int = 1,
    notify: Any = _silent,
    connector: KVConnector | None = None,
) -> tuple[EngineLoop, Recorder]:
    """An engine on a started executor; call `engine.tick()` until it returns False."""
    capacity = executor.start(EngineConfig())
    scheduler = BudgetScheduler(
        limits or Limits(), capacity, policy or ByArrival(), step_parts(connector)
    )
    recorder = Recorder()
    return EngineLoop(scheduler, executor, recorder, notify, depth), recorder


def run_to_end(engine: EngineLoop, requests: Sequence[Request], most: int) -> None:
    """Submit requests and tick until nothing is left. Raises AssertionError after `most` ticks."""
    for request in requests:
        engine.submit(request)
    ticks = 0
    while engine.busy or not ticks:
        engine.tick()
        ticks += 1
        assert ticks < most, "the engine makes no progress: a request is never admitted or ended"
    engine.tick()


def step_parts(connector: KVConnector | None = None) -> tuple[StepPart, ...]:
    """The installed step parts, for an engine without a configuration."""
    plugins = manager.current()
    parts = open_parts(EngineConfig(), plugins)
    if connector is None:
        return parts
    return (*parts, plugins.load("step_parts", "transfers")(connector))


def free_blocks(pool: BlockPool) -> list[int]:
    """Return the free blocks in the order in which they will be taken."""
    blocks, block = [], pool._next[NULL]
    while block != NULL:
        blocks.append(block)
        block = pool._next[block]
    return blocks


def check_empty(engine: EngineLoop) -> None:
    """Raise EngineError unless nothing is queued, running, or held in any pool or row."""
    scheduler = engine.scheduler
    if not isinstance(scheduler, BudgetScheduler):
        raise EngineError(f"{type(scheduler).__name__} cannot be looked into")
    left = {
        "busy": engine.busy,
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "rows": scheduler.limits.rows - scheduler.table.free,
        "queued tokens": scheduler.queue.tokens,
        "rows to fill blocks": scheduler.prefix_reuse.expected,
    }
    for number, group in enumerate(scheduler.cache.groups):
        left[f"blocks of group {number}"] = group.pool.used
        left[f"table of group {number}"] = int(group.tables.any())
        left[f"free list of group {number}"] = len(free_blocks(group.pool)) != group.pool.free
    wrong = {name: value for name, value in left.items() if value}
    if wrong:
        raise EngineError(f"left behind: {wrong}")
