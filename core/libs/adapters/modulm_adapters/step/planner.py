"""The scheduler's half: assigns adapters to slots and evicts idle ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from modulm.contracts.executor import Plan
from modulm.contracts.requests import Request
from modulm.contracts.step_part import PartPlanner, PlannerContext, StepDraft, WaitingRequest
from modulm.errors import RequestError
from modulm_adapters.step.values import AdapterRow, SlotFills

__all__ = ["AdapterPlanner", "AdapterSlots", "NoAdapters"]


class NoAdapters(PartPlanner):
    """Refuses adapters, for engines without them."""

    def check(self, request: Request) -> None:
        if request.adapter is not None:
            raise RequestError("the engine runs without adapters", "model")


class AdapterPlanner(PartPlanner):
    """Assigns slots to the adapters of requests."""

    def __init__(self, context: PlannerContext) -> None:
        self.slots = AdapterSlots(int(context.values["slots"]))
        self._rows = context.limits.rows

    def defers(self, waiting: WaitingRequest, before: Sequence[WaitingRequest]) -> bool:
        """Defer requests without a free slot; at most as many others as rows overtake them."""
        adapter, fits = waiting.request.adapter, self.slots.fits
        if adapter is None:
            return False
        deferred = [other for other in before if not fits(other.request.adapter)]
        if not fits(adapter) or any(other.overtaken >= self._rows for other in deferred):
            return True
        for other in deferred:
            other.overtaken += 1
        return False

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        self.slots.take(waiting.request.adapter)

    def row_value(self, request: Request) -> AdapterRow | None:
        if request.adapter is None:
            return None
        return AdapterRow(request.adapter, request.adapter_from)

    def release(self, request: Request, row: int) -> None:
        self.slots.release(request.adapter)

    def plan(self, step: StepDraft, left: int) -> SlotFills | None:
        return self.slots.take_changes() or None

    def fail(self, plan: Plan) -> None:
        self.slots.restore(plan.parts.get("adapters", ()))

    def forget(self, idle: bool) -> None:
        self.slots.forget()


class AdapterSlots:
    """Slots 1 ... `most`, each with the adapter it was last assigned to.

    Adapters of running rows keep their slots; of the others the least recently used one is evicted.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        #: Adapter -> slot, least recently used first.
        self._slots: dict[str, int] = {}
        self._users: Counter[str] = Counter()
        self._changes: dict[int, str] = {}

    def fits(self, adapter: str | None) -> bool:
        """Whether a row with the adapter can run together with the running rows."""
        if adapter is None or adapter in self._slots:
            return True
        return len(self._slots) < self.most or len(self._users) < self.most

    def take(self, adapter: str | None) -> None:
        """Start a row with the adapter."""
        if adapter is None:
            return
        slot = self._slots.pop(adapter, None)
        if slot is None:
            slot = self._free()
            self._changes[slot] = adapter
        self._slots[adapter] = slot
        self._users[adapter] += 1

    def _free(self) -> int:
        if len(self._slots) < self.most:
            taken = set(self._slots.values())
            return next(slot for slot in range(1, self.most + 1) if slot not in taken)
        idle = next(name for name in self._slots if name not in self._users)
        return self._slots.pop(idle)

    def release(self, adapter: str | None) -> None:
        """Release a row with the adapter."""
        if adapter is None:
            return
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def restore(self, fills: SlotFills) -> None:
        """Fill these slots again, since the step that should have filled them failed."""
        self._changes |= {slot: name for slot, name in fills if self._slots.get(name) == slot}

    def forget(self) -> None:
        """Empty the slots that no row uses."""
        self._slots = {name: slot for name, slot in self._slots.items() if name in self._users}

    def take_changes(self) -> SlotFills:
        """Return (slot, adapter) for the slots assigned since the last call."""
        changes, self._changes = self._changes, {}
        return tuple(changes.items())
