"""Step part of adapters: each row may use a different one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm.contracts.step_part import BuiltModel, PartPlanner, PlannerContext, StepPart
from modulm_adapters.step.values import AdapterRow, SlotFills

if TYPE_CHECKING:
    from modulm_adapters.step.runner import AdapterRunner

__all__ = ["AdaptersPart"]


class AdaptersPart(StepPart):
    """Step part of adapters; on if the model was loaded with an adapter bank."""

    name = "adapters"
    api = 1

    def planner(self, context: PlannerContext) -> PartPlanner:
        from modulm_adapters.step.planner import AdapterPlanner, NoAdapters

        return AdapterPlanner(context) if context.values.get("slots") else NoAdapters()

    def runner(self, built: BuiltModel) -> AdapterRunner | None:
        from modulm_adapters.step.runner import AdapterRunner

        bank = built.loaded.adapters
        return None if bank is None else AdapterRunner(bank, built.platform.staging())

    def unpack_plan(self, packed: Any) -> SlotFills:
        return tuple(map(tuple, packed))

    def pack_row(self, value: AdapterRow) -> Any:
        return [value.name, value.first]

    def unpack_row(self, packed: Any) -> AdapterRow:
        return AdapterRow(*packed)
