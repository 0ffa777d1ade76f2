"""Detects whether an engine makes progress, from within its process.

A living process is not enough: a step may hang on a lock or a device. Nor is a long step a failure:
a long prompt on a slow machine takes minutes. `StepWatch` distinguishes the two from another
thread; `watchdog` also detects a silent process, and acts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from attrs import define, field

from modulm.plugins import current
from modulm.plugins.index import is_first_party
from modulm_server.flags import ServerConfig, WatchdogConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Self

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.executor import Plan
    from modulm.engine.core.engine_core import EngineCore
    from modulm.engine.core.loop import EngineLoop
    from modulm.plugins.declaration import Declaration

__all__ = ["StepWatch", "interval_of", "plugin_at_work", "stacks_file"]

#: Seconds allowed per token of a step that computes: 70 billion parameters on two cores.
_PER_TOKEN = 0.25
#: Minimum share of a core that a computing process uses.
_COMPUTING = 0.2
#: Extra seconds for the first steps on a device with a queue, while kernels compile.
_COLD, _COLD_STEPS = 120.0, 3


def _processor_seconds() -> float:
    """Processor seconds used by this process and its ended children.

    Those of the process are finer than `os.times`: one of its ticks (10 ms) would be the share of
    a computing process in a short interval.
    """
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


@define(eq=False)
class StepWatch:
    """Watches an engine loop from another thread, every `interval` seconds. timeout 0: never.

    ranks: why a rank does not respond, or None.
    """

    loop: EngineLoop
    timeout: float
    cold: float = 0.0
    interval: float = 1.0
    clock: Callable[[], float] = time.monotonic
    spent: Callable[[], float] = _processor_seconds
    ranks: Callable[[], str | None] = lambda: None
    _worked: float = field(init=False)
    _seen: tuple[float, float] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._worked = self.clock()
        self._seen = (self._worked, self.spent())

    @classmethod
    def of(cls, core: EngineCore) -> Self:
        """The watch of an engine, as configured."""
        from modulm_distributed.executor import WorkersExecutor

        config, executor = core.config, core.executor
        timeout = config.group(ServerConfig).engine_heartbeat_timeout
        cold = _COLD if config.scheduler.async_scheduling else 0.0
        watch = cls(core.loop, timeout, cold, interval_of(config))
        if isinstance(executor, WorkersExecutor):
            watch.ranks = executor.trouble
        return watch

    def look(self) -> str | None:
        """Why the engine counts as stalled, or None."""
        now, now_used = self.clock(), self.spent()
        before, spent_before = self._seen
        self._seen = (now, now_used)
        since, plan = self.loop.busy_since, self.loop.plan
        stopped = self.ranks() if self.timeout else None
        if stopped is not None:
            return stopped
        if since is None or not self.timeout:
            self._worked = now
            return None
        if now_used - spent_before >= _COMPUTING * (now - before):
            self._worked = now
        idle = now - max(self._worked, since)
        if idle > self.timeout:
            return f"a step has done nothing for {idle:.0f} s{plugin_at_work()}"
        lasts = now - since
        if lasts > self.timeout + self._allowance(plan):
            return f"a step has not ended for {lasts:.0f} s{plugin_at_work()}"
        return None

    def _allowance(self, plan: Plan | None) -> float:
        """Seconds beyond the timeout that a step may take while it computes."""
        if plan is None:
            return self.cold
        cold = self.cold if plan.step <= _COLD_STEPS else 0.0
        return cold + _PER_TOKEN * int(plan.counts.sum())


def plugin_at_work(thread: int | None = None) -> str:
    """Return ", in FUNCTION of PLUGIN" for a third party's code that this process runs, else "".

    It is the innermost such frame of the thread with this identifier. None: of any other thread,
    the main thread's last.
    """
    homes: dict[str, Declaration] = {}
    for declared in current().everything():
        if not is_first_party(declared.distribution):
            module = declared.target.partition(":")[0]
            homes.setdefault(module, declared)
            homes.setdefault(module.partition(".")[0], declared)
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames() if homes else {}
    threads = sorted(frames.keys() - {own}, key=lambda ident: ident == main)
    for ident in threads if thread is None else frames.keys() & {thread}:
        frame: FrameType | None = frames[ident]
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            plugin = homes.get(name) or homes.get(name.partition(".")[0])
            if plugin is not None:
                return f", in {frame.f_code.co_qualname} of {plugin}"
            frame = frame.f_back
    return ""


def interval_of(config: EngineConfig) -> float:
    """Seconds between two heartbeats."""
    configured = config.group(WatchdogConfig).check_interval
    usual = min(1.0, config.group(ServerConfig).engine_heartbeat_timeout / 5)
    return usual if configured is None else configured


def stacks_file(config: EngineConfig) -> IO[str]:
    """Open the file for this process's stacks. It stays open for the signal handler."""
    folder = config.group(WatchdogConfig).dump_dir
    if not folder:  # vLLM's default is an empty one
        return sys.stderr
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder, f"modulm-stacks-{os.getpid()}.txt").open("a", encoding="utf-8")
