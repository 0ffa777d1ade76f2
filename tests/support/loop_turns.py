"""CPU time of an event loop's thread in one turn, which other processes hardly change."""

from __future__ import annotations

import asyncio
import threading
import time

__all__ = ["BOUND", "Beat"]

#: CPU seconds of one turn: twice what is meant, for slow and busy machines.
BOUND = 0.1


class Beat:
    """CPU seconds that a loop's thread spends between two beats, at most.

    A beat is due every few milliseconds, so this is the longest turn, whatever the loop is made
    of: libuv's callbacks pass no Python code that could be replaced.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest = 0.0
        self._loop, self._last, self._over = loop, 0.0, False
        loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._last = time.thread_time()
        self._beat()

    def _beat(self) -> None:
        self.longest = max(self.longest, time.thread_time() - self._last)
        self._last = time.thread_time()
        if not self._over:
            self._loop.call_later(0.005, self._beat)

    def end(self) -> float:
        """Stop; returns the seconds of the longest turn."""
        done = threading.Event()
        self._over = True
        self._loop.call_soon_threadsafe(lambda: (self._beat(), done.set()))
        done.wait(300)
        return self.longest
