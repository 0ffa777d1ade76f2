"""Stores the events of a background response for its readers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["Log"]


class Log:
    """Frames in order of their sequence numbers.

    Readers start at any frame and wait for new ones until the log is closed.
    """

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.closed = False
        self._news = asyncio.Event()

    def add(self, frame: bytes) -> None:
        """Append a frame and wake the readers."""
        self.frames.append(frame)
        self._wake()

    def close(self) -> None:
        """Close the log: no frame will follow."""
        self.closed = True
        self._wake()

    async def read(self, index: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the frames from `index` on."""
        while True:
            while index < len(self.frames):
                yield self.frames[index]
                index += 1
            if self.closed:
                return
            await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
