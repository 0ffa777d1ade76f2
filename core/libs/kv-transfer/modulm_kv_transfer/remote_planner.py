"""The scheduler's half of connectors between engines: requests ask for transfers.

A prompt's blocks are saved while the step that fills them runs, if the workers' movers can do that
(`modulm_kv_transfer.layers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modulm.contracts.connector import BlockTransfer, TransferPlan
from modulm.contracts.executor import PartReport, Plan
from modulm.contracts.requests import Request
from modulm.contracts.state import SEGMENT
from modulm.contracts.step_part import PlannerContext, StepDraft, WaitingRequest
from modulm_kv_transfer.planner import Load, TransferPlanner
from modulm_kv_transfer.remote import LayeredPlan, RemoteIndex

__all__ = ["RemoteTransferPlanner"]

#: Tokens of fetched prompts that a step computes at least.
_LEAST = 2


class RemoteTransferPlanner(TransferPlanner):
    """Plans transfers between engines, which requests ask for."""

    def __init__(self, index: RemoteIndex, context: PlannerContext) -> None:
        super().__init__(index, context)
        self._remote = index
        self._known: set[str] = set()
        #: Requests whose answers have no `kv_transfer_params` yet.
        self._unanswered: set[str] = set()
        #: Whether blocks are saved while they are computed.
        self._layered = bool(context.values.get("layers"))
        #: Rows with states of which a step began within a segment. What follows is rounded
        #: differently, so it is not kept, see `TransferPlanner._stateful`.
        self._uneven: set[int] = set()
        #: Tokens of a step with rows that generate and the last blocks of fetched prompts.
        divisible = context.limits.chunked and context.cache.unit == 1
        self._together = int(context.values.get("together", 0)) if divisible else 0
        #: Rows whose prompt was fetched and is not complete.
        self._fetched: set[int] = set()
        #: Row -> tokens that were cached when it was admitted, until its first step is planned.
        self._admitted: dict[int, int] = {}
        #: Saves whose step has not ended.
        self._computing: set[int] = set()
        #: Saves whose step has succeeded, or failed, which the workers do not know yet.
        self._ended: tuple[list[int], list[int]] = ([], [])

    @property
    def busy(self) -> bool:
        return super().busy or any(self._ended)

    def check(self, request: Request) -> None:
        self._remote.check(request)

    def external(self, waiting: WaitingRequest, cached: int) -> int | None:
        request = waiting.request
        if request.id not in self._known:
            self._known.add(request.id)
            self._unanswered.add(request.id)
            self._remote.add(request)
        return super().external(waiting, cached)

    def joined(self, request: Request, row: int, start: int, count: int) -> None:
        self._admitted[row] = start

    def source(self, request: str) -> Any:
        return self._remote.source(request)

    def skip(self, request: str) -> None:
        # Nobody shall wait for blocks that do not come.
        self._unanswered.discard(request)

    def plan(self, step: StepDraft, left: int) -> TransferPlan | None:
        computing: list[BlockTransfer] = []
        if self._layered and not step.one_each:
            computing = self._save_computed(step)
        self._admitted.clear()
        value = super().plan(step, left)
        if not (computing or any(self._ended)):
            return value
        value = value or TransferPlan()
        (committed, dropped), self._ended = self._ended, ([], [])
        return LayeredPlan(
            value.loads, value.saves, value.holds, tuple(computing), tuple(committed),
            tuple(dropped),
        )  # fmt: skip

    def _save_computed(self, step: StepDraft) -> list[BlockTransfer]:
        """Start saves of the prompts' blocks that this step fills."""
        if self._units.states:
            self._uneven.update(step.rows[step.starts % SEGMENT != 0].tolist())
        size, started = self._units.size, []
        firsts, lasts = step.starts // size, (step.starts + step.counts) // size
        for index in np.flatnonzero(lasts > firsts).tolist():
            row, first = int(step.rows[index]), int(firsts[index])
            names = self._units.names(self._names.names(row))
            transfer = self._save_units(row, names, first, min(int(lasts[index]), len(names)))
            if transfer is not None:
                started.append(transfer)
        return started

    def _save_units(
        self, row: int, names: Sequence[bytes], first: int, last: int
    ) -> BlockTransfer | None:
        """Start to save the units `first` to `last` of a row, which the step fills.

        None, without a change: they are saved once the step is committed.
        """
        request, done = str(self._table.names[row]), self._saved.get(row, 0)
        if row in self._uneven or last <= first:
            return None
        if self.index.blocks_to_save(request, names[:last]) < last:
            return None
        cached = self._admitted.get(row, 0) // self._units.size == first
        if done != first and not (done < first and cached):
            return None
        units = range(first, last)
        columns = [self._blocks(row, part, units) for part in range(len(self._units.parts))]
        chosen = [n for n, unit in enumerate(units) if names[unit] not in self._saving]
        if not (chosen and np.all(np.array(columns))):
            return None
        if done < first:
            self._save(request, row, names, range(done, first))
        self._saved[row] = last
        blocks = tuple(tuple(ids[n] for n in chosen) for ids in columns)
        return self._begin_save(request, tuple(names[first + n] for n in chosen), blocks)

    def _begin_save(
        self, request: str, names: tuple[bytes, ...], blocks: tuple[tuple[int, ...], ...]
    ) -> BlockTransfer:
        transfer = self._transfer(request, names, blocks)
        self._saving.update(names)
        self._saves[transfer.id] = transfer
        self._computing.add(transfer.id)
        return transfer

    def receive(self, plan: Plan, report: PartReport) -> None:
        self._end_step(plan, worked=True)
        super().receive(plan, report)

    def fail(self, plan: Plan) -> None:
        super().fail(plan)
        value = plan.parts.get("transfers")
        if isinstance(value, LayeredPlan):
            self._end_step(plan, worked=False)
            for transfer in value.computing:
                self._end(transfer.id, worked=False)
            # The workers may not have read it.
            self._ended[0].extend(value.committed)
            self._ended[1].extend(value.dropped)

    def _end_step(self, plan: Plan, *, worked: bool) -> None:
        """Note that the step of some saves has succeeded, or failed."""
        value = plan.parts.get("transfers")
        if isinstance(value, LayeredPlan):
            for transfer in value.computing:
                if transfer.id in self._computing:
                    self._computing.discard(transfer.id)
                    self._ended[0 if worked else 1].append(transfer.id)

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        events = super().events(names)
        if not self._unanswered:
            return events
        answers = {}
        for request in self._unanswered.intersection(names.values()):
            self._unanswered.discard(request)
            if (answer := self._remote.answer(request)) is not None:
                answers[request] = answer
        return {**events, "transfer_params": answers} if answers else events

    def claim(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        # A block's rest at once would make the next tokens of all other rows late.
        if self._fetched and self._together:
            fetched = np.isin(rows, list(self._fetched))
            if generating := int(np.count_nonzero(counts[~fetched] == 1)):
                rest = max(self._together - generating, _LEAST)
                before = np.cumsum(counts * fetched) - counts * fetched
                np.minimum(counts, np.clip(rest - before, 0, None), out=counts, where=fetched)

    def sampled(self, rows: np.ndarray) -> None:
        self._fetched.difference_update(rows.tolist())

    def _arrived(self, load: Load, *, worked: bool) -> None:
        if worked and self._together:
            self._fetched.add(load.row)
        super()._arrived(load, worked=worked)

    def release(self, request: Request, row: int) -> None:
        self._uneven.discard(row)
        self._fetched.discard(row)
        super().release(request, row)

    def finished(self, request: str) -> None:
        self._known.discard(request)
        self._unanswered.discard(request)
        super().finished(request)
