"""Starts simultaneous requests a few at a time, to keep the event loop responsive."""

from __future__ import annotations

import asyncio
from collections import deque

from attrs import define, field

__all__ = ["Turns"]

#: Requests to start per turn of the event loop. Each takes half a millisecond.
_PER_TURN = 2


@define(eq=False)
class Turns:
    """Lets `per_turn` callers pass per turn of the event loop, in order.

    Starting hundreds of requests in one turn would delay health checks and streams.
    """

    per_turn: int = _PER_TURN
    _started: int = field(default=0, init=False)
    _waiting: deque[asyncio.Future[None]] = field(factory=deque, init=False)

    async def wait(self) -> None:
        """Wait until the caller may start."""
        if self._started < self.per_turn:
            if not self._started:
                asyncio.get_running_loop().call_soon(self._next)
            self._started += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """Let the next callers pass, in a new turn of the event loop."""
        self._started = 0
        while self._waiting and self._started < self.per_turn:
            turn = self._waiting.popleft()
            if not turn.done():  # it may be cancelled
                turn.set_result(None)
                self._started += 1
        if self._started:
            asyncio.get_running_loop().call_soon(self._next)
