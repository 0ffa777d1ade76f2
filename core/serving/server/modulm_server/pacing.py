"""Starts simultaneous requests a few at a time, to keep the event loop responsive.

Those of each API key start in turn, and those that nobody waits for after others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable

from attrs import define, field

__all__ = ["Answers", "FairSemaphore", "Turns"]

#: Requests to start per turn of the event loop. Each takes half a millisecond.
_PER_TURN = 2
#: Seconds for which an answer that has not begun holds up requests that can wait, and for which
#: answers hold up one of these at most.
_LONGEST = 0.5
#: Seconds after the last request of a client for which `Answers.recent` says so.
_RECENT = 5.0


class _Waiting:
    """Callers that wait: the first of each key in turn, so that a key with many delays no other."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def add(self, key: Hashable) -> asyncio.Future[None]:
        """Add a caller, who waits for the future."""
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(turn)
        return turn

    def start_next(self) -> bool:
        """Let the next caller pass; returns whether there was one."""
        while self._queues:
            key = next(iter(self._queues))
            queue = self._queues.pop(key)
            turn = queue.popleft()
            if queue:
                self._queues[key] = queue  # behind the other keys
            if not turn.done():  # it may be cancelled
                turn.set_result(None)
                return True
        return False


@define(eq=False)
class Turns:
    """Lets `per_turn` callers pass per turn of the event loop, in order, those of each key in turn.

    Starting hundreds of requests in one turn would delay health checks and streams.
    """

    per_turn: int = _PER_TURN
    _started: int = field(default=0, init=False)
    _waiting: _Waiting = field(factory=_Waiting, init=False)

    async def wait(self, key: Hashable = None) -> None:
        """Wait until the caller may start. key: whose request it is."""
        if self._started < self.per_turn:
            if not self._started:
                asyncio.get_running_loop().call_soon(self._next)
            self._started += 1
            return
        await self._waiting.add(key)

    def _next(self) -> None:
        """Let the next callers pass, in a new turn of the event loop."""
        self._started = 0
        while self._started < self.per_turn and self._waiting.start_next():
            self._started += 1
        if self._started:
            asyncio.get_running_loop().call_soon(self._next)


@define(eq=False)
class FairSemaphore:
    """Lets `count` callers work at once; of those that wait, the first of each key in turn."""

    count: int
    _used: int = field(default=0, init=False)
    _waiting: _Waiting = field(factory=_Waiting, init=False)

    async def acquire(self, key: Hashable = None) -> None:
        """Wait until the caller may work. key: whose work it is."""
        if self._used < self.count:
            self._used += 1
            return
        turn = self._waiting.add(key)
        try:
            await turn
        except BaseException:
            if not turn.cancel() and not turn.cancelled():  # the caller was let pass
                self.release()
            raise

    def release(self) -> None:
        """End the work of a caller."""
        if not self._waiting.start_next():
            self._used -= 1


class Answers:
    """The answers that clients wait for and that have not begun.

    Requests that can wait, such as the lines of batches, start when there are none.
    """

    def __init__(self) -> None:
        self._awaited: dict[object, asyncio.TimerHandle] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._last = float("-inf")

    @property
    def recent(self) -> bool:
        """Whether a client has asked for something in the last seconds."""
        return time.monotonic() - self._last < _RECENT

    def expect(self) -> Callable[[], None]:
        """Note a request that has come. Returns a function to call when its answer begins."""
        key, loop = object(), asyncio.get_running_loop()
        self._last = time.monotonic()

        def begun() -> None:
            timer = self._awaited.pop(key, None)
            if timer is not None:
                timer.cancel()
                if not self._awaited:
                    self._release()

        self._awaited[key] = loop.call_later(_LONGEST, begun)
        return begun

    async def wait(self) -> None:
        """Wait until no answer is awaited, but not for long."""
        if self._awaited:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.add(turn)
            await asyncio.wait({turn}, timeout=_LONGEST)
            self._waiting.discard(turn)

    def _release(self) -> None:
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
        self._waiting.clear()
