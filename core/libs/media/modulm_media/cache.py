"""An LRU cache of processor outputs, keyed by content."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modulm_media.family import Processed

__all__ = ["ProcessedCache"]


class ProcessedCache:
    """Holds at most `room` bytes of tensors; evicts the least recently used. Thread-safe."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._entries: OrderedDict[bytes, tuple[Processed, int]] = OrderedDict()
        self._used = 0
        self._lock = Lock()

    def get(self, key: bytes) -> Processed | None:
        """Return the entry for `key`, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: bytes, value: Processed) -> None:
        """Store an entry, unless it alone exceeds the cache's size."""
        size = value.nbytes
        if size > self._room:
            return
        with self._lock:
            _, before = self._entries.pop(key, (None, 0))
            self._entries[key] = (value, size)
            self._used += size - before
            while self._used > self._room:
                _, (_, freed) = self._entries.popitem(last=False)
                self._used -= freed

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()
            self._used = 0

    def __len__(self) -> int:
        return len(self._entries)
