"""Blocks that other engines may fetch: a fixed number of slots in host memory, LRU eviction."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import torch

__all__ = ["Filling", "PeerStore"]

#: Names of evicted blocks that are remembered, so that nobody waits for them.
_EVICTED = 1 << 16


class Filling:
    """Blocks whose step is running. slots: by name. written: tensors that all of them have."""

    def __init__(self, slots: Mapping[bytes, int]) -> None:
        self.slots = slots
        self.written: list[int] = []
        #: Whether the blocks are stored now; None: the step is running.
        self.worked: bool | None = None


class PeerStore:
    """Blocks by name. Thread-safe. memory: [slots, width] uint8."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._filling: dict[bytes, Filling] = {}
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

    def fill(self, names: Sequence[bytes], slots: Sequence[int]) -> Filling:
        """Let peers read blocks while their slots are filled, until `end`."""
        filling = Filling(dict(zip(names, slots, strict=True)))
        with self._changed:
            self._filling.update(dict.fromkeys(names, filling))
            self._changed.notify_all()
        return filling

    def write(self, filling: Filling, tensors: Sequence[int]) -> None:
        """Publish tensors that the slots have now."""
        with self._changed:
            filling.written += tensors
            self._changed.notify_all()

    def end(self, filling: Filling, *, worked: bool) -> None:
        """Store the blocks, or discard them."""
        with self._changed:
            filling.worked = worked
            for name in filling.slots:
                self._filling.pop(name, None)
            (self.add if worked else self.give_up)(filling.slots, filling.slots.values())

    def hold(
        self, names: Sequence[bytes], seconds: float, most: int | None = None
    ) -> tuple[list[int], Filling | None]:
        """Return the slots of at most `most` leading names that are stored; they stay until `drop`.

        If the first one is being filled, those of all names that are filled with it, and what says
        how far. Waits up to `seconds` for the first one, but not for one that was evicted.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while names[0] not in self._slots and names[0] not in self._filling:
                left = until - time.monotonic()
                if self._closed or left <= 0 or any(name in self._gone for name in names):
                    return [], None
                self._changed.wait(left)
            filling = None if names[0] in self._slots else self._filling[names[0]]
            known = self._slots if filling is None else filling.slots
            wanted = names[:most] if filling is None else names
            slots = [known[name] for name in takewhile(known.__contains__, wanted)]
            self._touch(names[: len(slots)])
            self._held.update(slots)
            return slots, filling

    def more(self, filling: Filling, count: int, seconds: float) -> list[int] | None:
        """Return the tensors written after the first `count`; []: all are, and the step succeeded.

        None: the step failed, or nothing came within `seconds`.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while len(filling.written) <= count and filling.worked is None:
                left = until - time.monotonic()
                if self._closed or left <= 0:
                    return None
                self._changed.wait(left)
            return None if filling.worked is False else filling.written[count:]

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
