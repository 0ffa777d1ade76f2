"""Which adapter each token of a step uses, told to the bank that applies them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from modulm.contracts.adapter import AdapterBank
from modulm.errors import EngineError, ModulmError

if TYPE_CHECKING:
    import torch

    from modulm.contracts.executor import Plan, RowStart
    from modulm.contracts.platform import Staging

__all__ = ["RowAdapters"]


class RowAdapters:
    """The adapters of rows by name, and the slots that plans have given to names."""

    def __init__(self, bank: AdapterBank | None, staging: Staging) -> None:
        self.bank = bank
        self._staging = staging
        #: Slots as plans gave them, and those of them that hold what they should.
        self._given: dict[int, str] = {}
        self._slots: dict[str, int] = {}
        self._rows: dict[int, str] = {}
        # Row -> its first token that the adapter applies to, where that is not the first of all.
        self._from: dict[int, int] = {}

    @property
    def slots(self) -> int:
        """How many adapters a step may use; 0 without a bank."""
        return 0 if self.bank is None else self.bank.slots

    def fill(self, plan: Plan) -> None:
        """Put adapters into the slots that the plan gives them; one that is gone leaves its slot
        empty until a row asks for it.
        """
        for slot, name in plan.adapters:
            if self.bank is None:
                raise EngineError(f"adapter {name!r} cannot be used: the model was built without")
            self._slots = {kept: at for kept, at in self._slots.items() if at != slot}
            self._given[slot] = name
            with suppress(ModulmError):
                self._put(slot, name)

    def _put(self, slot: int, name: str) -> None:
        if self.bank is not None:
            self.bank.fill(slot, name)
            self._slots[name] = slot

    def admit(self, start: RowStart) -> None:
        """A row starts. Raises what `AdapterBank.fill` does if its adapter cannot be used."""
        if start.adapter is not None:
            if start.adapter not in self._slots:
                slots = [slot for slot, name in self._given.items() if name == start.adapter]
                if not slots:
                    raise EngineError(f"adapter {start.adapter!r} was given no slot")
                self._put(slots[0], start.adapter)
            self._rows[start.row] = start.adapter
            if start.adapter_from:
                self._from[start.row] = start.adapter_from

    def release(self, row: int) -> None:
        """The row is gone."""
        self._rows.pop(row, None)
        self._from.pop(row, None)

    def of_rows(self, rows: Sequence[int]) -> np.ndarray | None:
        """[n] int32, the slots that the rows use; None where none uses any."""
        names = [self._rows.get(row) for row in rows] if self._rows else []
        if not any(names):
            return None
        slots = [0 if name is None else self._slots[name] for name in names]
        return np.array(slots, dtype=np.int32)

    def of_tokens(self, plan: Plan) -> np.ndarray | None:
        """[tokens] int32, the slot that each token of the plan uses; None where none uses any."""
        slots = self.of_rows(plan.rows.tolist()) if self._rows else None
        if slots is None:
            return None
        each = np.repeat(slots, plan.counts)
        if self._from:
            ends = plan.counts.cumsum()
            for place, row in enumerate(plan.rows.tolist()):
                before = self._from.get(row, 0) - int(plan.starts[place])
                if before > 0:
                    first = ends[place] - plan.counts[place]
                    each[first : min(first + before, ends[place])] = 0
        return each if each.any() else None

    def of_span(self, row: int, start: int, count: int) -> np.ndarray | None:
        """[count] int32, the slots of a row's tokens from `start` on; None where none uses any."""
        slots = self.of_rows([row] * count)
        if slots is not None:
            slots[: max(self._from.get(row, 0) - start, 0)] = 0
        return slots

    @property
    def recordable(self) -> bool:
        """See `AdapterBank.recordable`."""
        return self.bank is not None and self.bank.recordable

    def begin(self, slots: np.ndarray | None) -> torch.Tensor | None:
        """What runs next runs on tokens, or hidden states, that use these slots."""
        if self.bank is None:
            return None
        # What is sent is only valid until the next time, and the batch is sent after this.
        sent = None if slots is None else self._staging.send((slots,))[0].clone()
        self.bank.begin_known(slots, sent)
        return sent
