"""Limits the lines of batches that run at once."""

from __future__ import annotations

import asyncio

__all__ = ["Slots"]

#: Lines of one key's batches that run at once, and bytes of their requests together.
_MAX_LINES, _MAX_BYTES = 32, 64 << 20


class Slots:
    """The running lines of all batches of one key."""

    def __init__(self) -> None:
        self._lines = self._bytes = 0
        self._released = asyncio.Event()

    async def acquire(self, size: int) -> None:
        """Wait until a line of `size` bytes may run; a line that is larger than all runs alone."""
        while self._lines >= _MAX_LINES or (self._lines and self._bytes + size > _MAX_BYTES):
            self._released.clear()
            await self._released.wait()
        self._lines += 1
        self._bytes += size

    def release(self, size: int) -> None:
        """End a line of `size` bytes."""
        self._lines -= 1
        self._bytes -= size
        self._released.set()
