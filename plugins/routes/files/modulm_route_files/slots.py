"""Limits the lines of batches that run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Slots"]

#: Lines of one key's batches that run at once, and bytes of their requests together.
_MAX_LINES, _MAX_BYTES = 32, 64 << 20
#: The same while clients are served. Each line lengthens the steps that a client waits for.
_FEW_LINES = 8


class Slots:
    """The running lines of all batches of one key. busy: whether clients are served."""

    def __init__(self, busy: Callable[[], bool] = lambda: False) -> None:
        self._busy = busy
        self._lines = self._bytes = 0
        self._released = asyncio.Event()

    async def acquire(self, size: int) -> None:
        """Wait until a line of `size` bytes may run; a line that is larger than all runs alone."""
        while not self._has_room(size):
            self._released.clear()
            await self._released.wait()
        self._lines += 1
        self._bytes += size

    def _has_room(self, size: int) -> bool:
        most = _FEW_LINES if self._busy() else _MAX_LINES
        return not self._lines or (self._lines < most and self._bytes + size <= _MAX_BYTES)

    def release(self, size: int) -> None:
        """End a line of `size` bytes."""
        self._lines -= 1
        self._bytes -= size
        self._released.set()
