"""Step part of pooling models, whose rows return an array instead of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from modulm.contracts.sampling import PoolingParams
from modulm.contracts.step_part import (
    DIRECT,
    BuiltModel,
    PartPlanner,
    PartRunner,
    PlannerContext,
    RunnerContext,
    StepPart,
)

if TYPE_CHECKING:
    import torch

    from modulm.contracts.executor import PartReport, Plan, RowStart
    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import Batch, Model
    from modulm.contracts.pooler import RowPooler
    from modulm.loading import Loaded

__all__ = ["PoolingPart", "PoolingPlanner", "PoolingRunner"]


class PoolingPart(StepPart):
    """Step part of pooling models; on if the model was loaded with a pooler."""

    name = "pooling"
    api = 1

    def planner(self, context: PlannerContext) -> PoolingPlanner | None:
        return PoolingPlanner() if context.values else None

    def runner(self, built: BuiltModel) -> PoolingRunner | None:
        return None if built.loaded.pooler is None else PoolingRunner(built.loaded)


class PoolingPlanner(PartPlanner):
    """Ends rows once their arrays have arrived."""

    def __init__(self) -> None:
        #: Row -> array, of the step being committed.
        self._pooled: Mapping[int, np.ndarray] = {}
        self._reported = False

    def receive(self, plan: Plan, report: PartReport) -> None:
        self._pooled, self._reported = report.value, True

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        self._pooled, self._reported = (self._pooled if self._reported else {}), False

    def ends(self, row: int) -> bool:
        return row in self._pooled

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        pooled = self._pooled
        return {"pooled": {names[row]: array for row, array in pooled.items() if row in names}}


class PoolingRunner(PartRunner):
    """Feeds hidden states of pooling rows to the model's pooler."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        #: Row -> first token of a pair's second text, or None.
        self._rows: dict[int, int | None] = {}
        self._model: Model | None = None
        self._platform: Any = None
        self.pooler: RowPooler | None = None

    @property
    def tokenless(self) -> Collection[int]:  # type: ignore[override]
        return self._rows

    def capacity(self) -> Mapping[str, Any]:
        return {"pools": True}

    def open(self, context: RunnerContext) -> None:
        loaded = self._loaded
        self._model, self._platform = context.model, context.platform
        self._staging = context.platform.staging()
        if loaded.pooler is not None:
            self.pooler = loaded.pooler.rows(loaded.pooling, context.logits, loaded.layers)

    def width(self, hidden: torch.Tensor) -> int | None:
        return None if self.pooler is None else self.pooler.width(hidden)

    def admit(self, start: RowStart, value: None) -> None:
        if isinstance(start.params, PoolingParams) and self.pooler is not None:
            self._rows[start.row] = start.params.second_text
            self.pooler.admit(start.row, start.params, start.prompt)

    def release(self, row: int) -> None:
        if row in self._rows and self.pooler is not None:
            del self._rows[row]
            self.pooler.release(row)

    def recording(self, plan: Plan) -> str | None:
        # Copied, since the pooler keeps it and recorded steps reuse their output buffers.
        return DIRECT if self._rows else None

    def watch(self, forward: Forward, plan: Plan) -> Forward:
        if not self._rows or self.pooler is None or self._model is None:
            return forward
        return self.pooler.watched(self._model, forward, plan)

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        if not any(self._rows.values()):
            return batch
        return evolve(batch, extras={"token_types": self._token_types(plan)})

    def _token_types(self, plan: Plan) -> torch.Tensor:
        """Return token types: [tokens] int64, 1 for tokens of a pair's second text, else 0."""
        types, ends = np.zeros(len(plan.tokens), dtype=np.int64), np.cumsum(plan.counts)
        for i, row in enumerate(plan.rows.tolist()):
            second = self._rows.get(row)
            if second is not None:
                first = ends[i] - plan.counts[i]
                types[first + max(second - int(plan.starts[i]), 0) : ends[i]] = 1
        sent: torch.Tensor = self._staging.send((types,))[0]
        return sent

    def collect(self, plan: Plan, hidden: torch.Tensor) -> Mapping[int, np.ndarray] | None:
        if not self._rows or self.pooler is None:
            return None
        complete, ends = [], np.cumsum(plan.counts)
        for i, row in enumerate(plan.rows.tolist()):
            if row in self._rows:
                self.pooler.feed(row, hidden[ends[i] - plan.counts[i] : ends[i]])
                complete += [row] if plan.samples[i] else []
        return self.pooler.finish(complete)
