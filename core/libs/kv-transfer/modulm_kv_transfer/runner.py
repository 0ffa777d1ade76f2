"""The worker's half: passes transfers to the connector's mover and reports completed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.connector import KVMover, TransferPlan, TransferResult
from modulm.contracts.executor import Plan
from modulm.contracts.step_part import PartRunner, RunnerContext
from modulm_kv_transfer.units import BlockUnits

__all__ = ["TransferRunner"]

#: Maximum wait in seconds of a step without rows, since new requests are admitted between steps.
_PAUSE = 0.002


class TransferRunner(PartRunner):
    """Passes transfers to a mover and returns its reports.

    remote: whether requests may exchange blocks with other engines.
    """

    def __init__(self, mover: KVMover, *, remote: bool = False) -> None:
        self._mover, self._remote = mover, remote

    def capacity(self) -> Mapping[str, Any]:
        return {"remote": 1} if self._remote else {}

    def open(self, context: RunnerContext) -> None:
        caches = BlockUnits(context.groups).arrange(context.caches)
        self._mover.open(caches, rank=context.rank, ranks=context.ranks)

    def close(self) -> None:
        self._mover.close()

    def begin(self, plan: Plan, value: TransferPlan | None) -> None:
        if value is not None:
            self._mover.begin(value)
            if not len(plan.rows):
                self._mover.wait(_PAUSE)

    def report(self) -> TransferResult | None:
        result = self._mover.ended()
        return result if result.done or result.failed or result.removed else None
