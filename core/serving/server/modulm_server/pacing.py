"""Requests that come at once begin a few at a time, so that the event loop has its turns."""

from __future__ import annotations

import asyncio
from collections import deque

from attrs import define, field

__all__ = ["Turns"]

#: Requests that begin in one turn of the event loop: each takes half a millisecond of it.
_MOST = 2


@define(eq=False)
class Turns:
    """Lets `most` callers through per turn of the event loop, the others in order behind them.

    Hundreds of requests in one turn would have everything else wait for all of them: signs of
    life, tokens of streams.
    """

    most: int = _MOST
    _begun: int = field(default=0, init=False)
    _waiting: deque[asyncio.Future[None]] = field(factory=deque, init=False)

    async def take(self) -> None:
        """Wait for one's turn, if there are others before."""
        if self._begun < self.most:
            if not self._begun:
                asyncio.get_running_loop().call_soon(self._next)
            self._begun += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """A new turn of the event loop."""
        self._begun = 0
        while self._waiting and self._begun < self.most:
            turn = self._waiting.popleft()
            if not turn.done():  # who left is not waited for
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)
