"""What processors made of media, by content, as long as there is room."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modulm_media.family import Processed

__all__ = ["ProcessedCache"]


class ProcessedCache:
    """At most `room` bytes of tensors, least recently used first out; safe among threads."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: OrderedDict[bytes, tuple[Processed, int]] = OrderedDict()
        self._used = 0
        self._lock = Lock()

    def get(self, key: bytes) -> Processed | None:
        """What is kept under the key."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: bytes, value: Processed) -> None:
        """Keep it, where it fits at all."""
        size = sum(array.nbytes for array in value.tensors.values()) + value.tokens.nbytes
        if size > self._room:
            return
        with self._lock:
            _, before = self._held.pop(key, (None, 0))
            self._held[key] = (value, size)
            self._used += size - before
            while self._used > self._room:
                _, (_, freed) = self._held.popitem(last=False)
                self._used -= freed

    def __len__(self) -> int:
        return len(self._held)
