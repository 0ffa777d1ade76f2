"""Blocks that other engines may fetch: a fixed number of slots in host memory, LRU eviction."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
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
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._slots)

    def reserve(self, names: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Return the indices of names that are not stored, and a free slot for each.

        The least recently used blocks make room. More names than slots: the first ones count.
        """
        with self._changed:
            new = [i for i, name in enumerate(names) if name not in self._slots]
            self._touch(names)
            new = new[: len(self.memory)]
            slots = []
            for _ in new:
                if not self._free:
                    name, slot = self._slots.popitem(last=False)
                    self._free.append(slot)
                    self._forget([name])
                slots.append(self._free.pop())
            return new, slots

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

    def missing(self, names: Sequence[bytes], deadline: float) -> int:
        """Wait until all are stored; return how many are not.

        Returns at once if one was evicted, and at the latest at `deadline` (monotonic seconds).
        """
        with self._changed:
            while True:
                lack = [name for name in names if name not in self._slots]
                left = deadline - time.monotonic()
                hopeless = self._closed or any(name in self._gone for name in lack)
                if not lack or hopeless or left <= 0:
                    self._touch(names)
                    return len(lack)
                self._changed.wait(left)

    def copy(self, name: bytes) -> bytes | None:
        """Return a block's bytes, or None if it is not stored any more."""
        with self._changed:
            slot = self._slots.get(name)
            return None if slot is None else self.memory[slot].numpy().tobytes()

    def close(self) -> None:
        """Make `missing` return."""
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
