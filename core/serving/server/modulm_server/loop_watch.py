"""Reports what holds up a server's event loop, while it does.

A hook, parser or route that runs in the server's process cannot be stopped there: Python ends no
thread from outside. It can be named, so that its operator isolates it or leaves it out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from attrs import define, field

from modulm_server.engine.heartbeat import plugin_at_work

__all__ = ["LoopWatch"]

log = logging.getLogger("modulm.server")

#: Seconds without a turn of the event loop after which it is reported, and between two looks.
_BUDGET, _INTERVAL = 5.0, 1.0
_ADVICE = "; `--isolate` limits the time of hooks, parsers and routes (plugins-isolation)"


@define(eq=False)
class LoopWatch:
    """Watches an event loop from a thread; the loop calls `tick` several times per second."""

    budget: float = _BUDGET
    clock: Callable[[], float] = time.monotonic
    _turn: float = field(init=False)
    _looked: float = field(init=False)
    _reported: bool = field(init=False, default=False)
    _thread: int = field(init=False, default=0)
    _ended: threading.Event = field(init=False, factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self._turn = self._looked = self.clock()

    def start(self) -> None:
        """Watch the loop of this thread."""
        self._thread = threading.get_ident()
        self.tick()
        threading.Thread(target=self._run, name="modulm-loop-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()

    def tick(self) -> None:
        """Note that the loop runs."""
        now = self.clock()
        if now - self._turn > self.budget:
            log.warning("the server answers again, after %.1f s", now - self._turn)
        self._turn, self._reported = now, False

    def look(self) -> None:
        """Report a loop that is held up, once.

        Nothing is reported if this thread has not run either: the process was stopped.
        """
        now, before = self.clock(), self._looked
        self._looked = now
        held_up = now - self._turn > self.budget and now - before <= self.budget
        if not held_up or self._reported:
            return
        self._reported = True
        where = plugin_at_work(self._thread)
        log.error(
            "the server has not answered for %.0f s: its event loop is held up%s",
            now - self._turn,
            where and where + _ADVICE,
        )

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self.look()
