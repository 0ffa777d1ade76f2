"""The worker's half: tells the bank which adapter each token of a pass uses."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from modulm.contracts.adapter import AdapterBank
from modulm.contracts.step_part import DIRECT, PartRunner, RunnerContext
from modulm.errors import EngineError, ModulmError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from modulm.contracts.executor import Plan, RowStart
    from modulm.contracts.model import Batch
    from modulm.contracts.platform import Staging
    from modulm_adapters.step.values import AdapterRow, SlotFills

__all__ = ["AdapterRunner"]

_NEVER = np.iinfo(np.int64).max


class AdapterRunner(PartRunner):
    """Tracks the adapters of rows and the slots that plans assign to them."""

    def __init__(self, bank: AdapterBank, staging: Staging) -> None:
        self.bank = bank
        self._staging = staging
        #: Slots as assigned by plans, and those that were filled.
        self._assigned: dict[int, str] = {}
        self._filled: dict[str, int] = {}
        #: The slot of each row, and the first token that uses it. The last entry is for padding,
        #: row -1.
        self._users: set[int] = set()
        self._slots = np.zeros(1, dtype=np.int32)
        self._firsts = np.full(1, _NEVER)
        self._sent: torch.Tensor | None = None

    def capacity(self) -> Mapping[str, int]:
        return {"slots": self.bank.slots}

    def open(self, context: RunnerContext) -> None:
        self._slots = np.zeros(context.rows + 1, dtype=np.int32)
        self._firsts = np.full(context.rows + 1, _NEVER)

    def prepare(self, plan: Plan, value: SlotFills | None) -> None:
        """Fill slots as planned. The slot of a removed adapter stays empty until a row needs it."""
        for slot, name in value or ():
            self._filled = {other: at for other, at in self._filled.items() if at != slot}
            self._assigned[slot] = name
            with suppress(ModulmError):
                self._fill(slot, name)

    def _fill(self, slot: int, name: str) -> None:
        self.bank.fill(slot, name)
        self._filled[name] = slot

    def admit(self, start: RowStart, value: AdapterRow | None) -> None:
        """Start a row. Raises like `AdapterBank.fill` if its adapter cannot be used."""
        if value is None:
            return
        if value.name not in self._filled:
            slots = [slot for slot, name in self._assigned.items() if name == value.name]
            if not slots:
                raise EngineError(f"adapter {value.name!r} has no slot")
            self._fill(slots[0], value.name)
        self._slots[start.row] = self._filled[value.name]
        self._firsts[start.row] = value.first
        self._users.add(start.row)

    def release(self, row: int) -> None:
        if row in self._users:
            self._users.discard(row)
            self._slots[row] = 0
            self._firsts[row] = _NEVER

    def recording(self, plan: Plan) -> str | None:
        if not self._users or not self._slots[plan.rows].any():
            return None
        used = plan.starts + plan.counts > self._firsts[plan.rows]
        slots = set(self._slots[plan.rows[used]].tolist()) - {0}
        if not slots:
            return None
        return "adapters" if self.bank.can_record(slots, len(plan.tokens)) else DIRECT

    def vary(self, batch: Batch) -> Batch | None:
        tokens = len(batch.tokens)
        if not self.bank.can_record((), tokens):
            return None
        slots = np.zeros(tokens, dtype=np.int32)
        sent = self._staging.send((slots,))[0].clone()
        self.bank.begin_known(slots, sent)
        return evolve(batch, adapters=sent)

    def focus(self, rows: np.ndarray | None, positions: np.ndarray | None) -> None:
        slots = None
        if self._users and rows is not None and positions is not None:
            slots = np.where(positions >= self._firsts[rows], self._slots[rows], 0)
            slots = slots.astype(np.int32) if slots.any() else None
        # Staged tensors are valid only until the next call, and the batch is sent after this.
        self._sent = None if slots is None else self._staging.send((slots,))[0].clone()
        self.bank.begin_known(slots, self._sent)

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        return batch if self._sent is None else evolve(batch, adapters=self._sent)
