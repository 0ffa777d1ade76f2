"""Adapter slots: which adapters a step can use, and which one gives way to another."""

from __future__ import annotations

from collections import Counter

__all__ = ["AdapterSlots"]


class AdapterSlots:
    """Slots 1 ... `most`, each with the adapter it was last given to.

    The adapters of running rows keep theirs; of the others the one that was used longest ago gives
    way.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        #: Adapter -> slot, least recently used first.
        self._slots: dict[str, int] = {}
        self._users: Counter[str] = Counter()
        self._given: dict[int, str] = {}

    def fits(self, adapter: str | None) -> bool:
        """Whether a row with the adapter can run beside those that run."""
        if adapter is None or adapter in self._slots:
            return True
        return len(self._slots) < self.most or len(self._users) < self.most

    def take(self, adapter: str | None) -> None:
        """A row with the adapter begins."""
        if adapter is None:
            return
        slot = self._slots.pop(adapter, None)
        if slot is None:
            slot = self._free()
            self._given[slot] = adapter
        self._slots[adapter] = slot
        self._users[adapter] += 1

    def _free(self) -> int:
        if len(self._slots) < self.most:
            taken = set(self._slots.values())
            return next(slot for slot in range(1, self.most + 1) if slot not in taken)
        idle = next(name for name in self._slots if name not in self._users)
        return self._slots.pop(idle)

    def release(self, adapter: str | None) -> None:
        """A row with the adapter is gone."""
        if adapter is None:
            return
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def lost(self, given: tuple[tuple[int, str], ...]) -> None:
        """The step that was to give these slots failed: they are given again."""
        self._given |= {slot: name for slot, name in given if self._slots.get(name) == slot}

    def forget(self) -> None:
        """The slots that no row uses are empty."""
        self._slots = {name: slot for name, slot in self._slots.items() if name in self._users}

    def given(self) -> tuple[tuple[int, str], ...]:
        """(slot, adapter) of those that took a slot since the last call."""
        given, self._given = self._given, {}
        return tuple(given.items())
