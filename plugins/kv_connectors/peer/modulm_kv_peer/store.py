"""Blocks that other engines may fetch: a fixed number of slots in host memory, LRU eviction."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import torch

__all__ = ["PeerStore"]

#: Names of evicted blocks that are remembered, so that nobody waits for them.
_EVICTED = 1 << 16


class PeerStore:
    """Blocks by name. Thread-safe. memory: [slots, width] uint8."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(len(memory)))
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._held: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._slots)

    def reserve(self, names: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Return the indices of names that are not stored, and a free slot for each.

        The least recently used blocks make room, unless they are being read. If there are fewer
        slots than names, the first names get one.
        """
        with self._changed:
            new = [i for i, name in enumerate(names) if name not in self._slots]
            self._touch(names)
            slots: list[int] = []
            for _ in new:
                if not self._free and not self._evict(names):
                    break
                slots.append(self._free.pop())
            self._forget(names[i] for i in new[len(slots) :])
            self._changed.notify_all()
            return new[: len(slots)], slots

    def _evict(self, new: Sequence[bytes]) -> bool:
        """Free the slot of the least recently used block; whether there was one."""
        wanted = frozenset(new)
        for name, slot in self._slots.items():
            if name in wanted:
                return False
            if not self._held[slot]:
                del self._slots[name]
                self._free.append(slot)
                self._forget([name])
                return True
        return False

    def add(self, names: Iterable[bytes], slots: Iterable[int]) -> None:
        """Publish blocks whose slots are filled."""
        with self._changed:
            for name, slot in zip(names, slots, strict=True):
                self._slots[name] = slot
                self._gone.pop(name, None)
            self._changed.notify_all()

    def give_up(self, names: Iterable[bytes], slots: Iterable[int]) -> None:
        """Return slots that could not be filled."""
        with self._changed:
            self._free += slots
            self._forget(names)
            self._changed.notify_all()

    def hold(self, names: Sequence[bytes], seconds: float) -> list[int]:
        """Return the slots of the leading names that are stored; they stay until `drop`.

        Waits up to `seconds` for the first one, but not for one that was evicted.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while names[0] not in self._slots:
                left = until - time.monotonic()
                if self._closed or left <= 0 or any(name in self._gone for name in names):
                    return []
                self._changed.wait(left)
            slots = []
            for name in names:
                if name not in self._slots:
                    break
                slots.append(self._slots[name])
            self._touch(names[: len(slots)])
            self._held.update(slots)
            return slots

    def drop(self, slots: Iterable[int]) -> None:
        """End a `hold`."""
        with self._changed:
            for slot in slots:
                self._held[slot] -= 1
                if not self._held[slot]:
                    del self._held[slot]

    def close(self) -> None:
        """Make `hold` return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _touch(self, names: Sequence[bytes]) -> None:
        """Mark blocks as used now. The end of a prefix is evicted before its beginning."""
        for name in reversed(names):
            if name in self._slots:
                self._slots.move_to_end(name)

    def _forget(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._gone[name] = None
        while len(self._gone) > _EVICTED:
            self._gone.popitem(last=False)
