"""Limit the memory that the media of all requests in progress use together."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Self

from modulm.errors import QueueFull

__all__ = ["MediaMemory", "Reservation", "default_limit"]

_LEAST, _UNKNOWN = 256 << 20, 1 << 30


class MediaMemory:
    """The budget of a server process; thread-safe.

    limit: in bytes. It is divided into equal shares, one for each owner that holds media and one
    for the next owner.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        with self._lock:
            return self._held.total()

    def reserve(self, owner: str = "") -> Reservation:
        """Create an empty reservation for a request; `owner` is empty on a server without keys."""
        return Reservation(self, owner)

    def _take(self, owner: str, size: int) -> None:
        with self._lock:
            share = self.limit // (len(self._held.keys() | {owner}) + 1) if owner else self.limit
            if self._held.total() + size > self.limit or self._held[owner] + size > share:
                if not self._held[owner]:
                    del self._held[owner]
                raise QueueFull(
                    "the server is at its limit of media bytes in progress "
                    "(--max-inflight-media-bytes); try again later"
                )
            self._held[owner] += size

    def _give(self, owner: str, size: int) -> None:
        with self._lock:
            self._held[owner] -= size
            if not self._held[owner]:
                del self._held[owner]


class Reservation:
    """The bytes of one request, released when it is closed."""

    def __init__(self, memory: MediaMemory, owner: str) -> None:
        self._memory, self._owner = memory, owner
        self._size, self._closed = 0, False
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Reserve `size` more bytes before they are allocated. Raises QueueFull."""
        with self._lock:
            if self._closed:
                raise QueueFull("the request has ended")
            self._memory._take(self._owner, size)
            self._size += size

    def give(self, size: int) -> None:
        """Release `size` bytes of what was reserved."""
        with self._lock:
            if not self._closed and size:
                self._memory._give(self._owner, size)
                self._size -= size

    def close(self) -> None:
        """Release all bytes; later calls of `take` fail."""
        with self._lock:
            self._closed = True
            size, self._size = self._size, 0
            if size:
                self._memory._give(self._owner, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_limit(path: Path = Path("/proc/meminfo")) -> int:
    """Return a quarter of the machine's available memory in bytes, at least 256 MiB."""
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return max(_LEAST, int(line.split()[1]) * 1024 // 4)
    except (OSError, ValueError):
        pass
    return _UNKNOWN
