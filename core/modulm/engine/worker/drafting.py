"""The drafter's place in a worker: what it sees of the rows, and what becomes of its mistakes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from attrs import evolve

from modulm.contracts.drafter import Drafter, DraftStep, Runs
from modulm.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

    from modulm.contracts.executor import Plan, RowStart
    from modulm.contracts.model import Batch
    from modulm.engine.worker.input_batch import BatchBuilder

__all__ = ["Drafting"]

log = logging.getLogger("modulm.engine")

T = TypeVar("T")
_FIRST = 256


class Drafting:
    """Asks a drafter after each step. One that raises is not asked again, and nobody is hurt.

    builder: of batches with the drafter's own caches alone, if it has any.
    """

    def __init__(self, drafter: Drafter, builder: BatchBuilder | None = None) -> None:
        self.most = drafter.most
        self._drafter: Drafter | None = drafter
        self._needs = drafter.needs
        self._builder = builder
        self._histories: dict[int, tuple[np.ndarray, int]] = {}
        self._limits: dict[int, int] = {}

    def admit(self, start: RowStart) -> None:
        """A row that generates starts."""
        self._extend(start.row, start.prompt, start.output)
        params = start.params
        if isinstance(params, SamplingParams):
            wanted = params.speculative
            self._limits[start.row] = self.most if wanted is None else min(wanted, self.most)
            prompt = len(start.prompt)
            self._asked(lambda drafter: drafter.admit(start.row, prompt, start.salt))

    def release(self, row: int) -> None:
        """The row is gone; unknown ones are ignored."""
        if self._histories.pop(row, None) is not None:
            del self._limits[row]
            self._asked(lambda drafter: drafter.release(row))

    @property
    def every(self) -> bool:
        """Whether the drafter is to see also steps in which no row gives a token."""
        return self._needs.every and self._drafter is not None

    def propose(
        self,
        plan: Plan,
        runs: Mapping[int, np.ndarray],
        batch: Callable[[], Batch],
        lasts: np.ndarray,
        hidden: torch.Tensor,
        layers: tuple[torch.Tensor, ...] = (),
    ) -> dict[int, np.ndarray]:
        """runs: row -> the tokens that it was just given; batch: makes what the model ran on;
        lasts, hidden, layers: as `DraftStep` has them. row -> the drafts.
        """
        for row, tokens in runs.items():
            self._extend(row, tokens)
        rows = [row for row in runs if self._limits[row]]
        if self._drafter is None or not (rows or self._needs.every):
            return {}
        order = plan.rows.tolist()
        kept = lasts if rows == order else lasts[[order.index(row) for row in rows]]
        step = DraftStep(
            rows=rows,
            histories=[self._history(row) for row in rows] if self._needs.histories else [],
            most=[self._limits[row] for row in rows],
            batch=batch(),
            kept=kept,
            hidden=hidden if self._needs.hidden else None,
            layers=layers,
        )
        if self._builder is not None:
            step = self._with_own(step, plan, lasts, self._builder)
        found = self._asked(lambda drafter: self._checked(drafter.propose(step), step.most))
        return {row: tokens for row, tokens in zip(rows, found or (), strict=False) if len(tokens)}

    def _with_own(
        self, step: DraftStep, plan: Plan, lasts: np.ndarray, builder: BatchBuilder
    ) -> DraftStep:
        """The step with what a drafter that keeps caches is told beside, and no more drafts than
        the rows have blocks for.
        """
        tables = [plan.tables[builder.groups[owner].table] for owner in builder.owners]
        sizes = [builder.groups[owner].block_size for owner in builder.owners]
        firsts = plan.counts.cumsum() - plan.counts
        ends = plan.starts + lasts - firsts + 1
        order = plan.rows.tolist()
        following = np.full(len(order), -1, dtype=np.int64)
        for place, (row, end) in enumerate(zip(order, ends.tolist(), strict=True)):
            tokens, count = self._histories.get(row, (plan.tokens, 0))
            if end < count:
                following[place] = tokens[end]
        places = {row: place for place, row in enumerate(order)}
        at = [places[row] for row in step.rows]
        room = np.min([_room(t[at], s) for t, s in zip(tables, sizes, strict=True)], axis=0)
        room = np.clip(room - ends[at], 0, step.most)
        return evolve(
            step,
            most=room.tolist(),
            ran=Runs(plan.rows, plan.starts, plan.counts, plan.tokens),
            lasts=lasts,
            following=following,
            own=lambda runs: builder.build(_plan_of(runs, plan, places), self._sample(runs)),
            tables=tables,
            sizes=sizes,
        )

    def _sample(self, runs: Runs) -> np.ndarray:
        """The places in a drafter's batch that count: all of short runs, which are recorded."""
        short = int(runs.counts.max(initial=0)) <= self.most + 1
        return np.arange(len(runs.tokens)) if short else runs.lasts

    def _checked(self, proposed: object, most: Sequence[int]) -> list[np.ndarray]:
        """As arrays. Raises ValueError for what is none."""
        arrays = [np.asarray(each).astype(np.int64, casting="safe") for each in proposed]  # type: ignore[attr-defined]
        if len(arrays) != len(most) or any(array.ndim != 1 for array in arrays):
            raise ValueError(f"{len(arrays)} proposals for {len(most)} rows, each of one dimension")
        return [array[:limit] for array, limit in zip(arrays, most, strict=True)]

    def _asked(self, question: Callable[[Drafter], T]) -> T | None:
        if self._drafter is None:
            return None
        try:
            return question(self._drafter)
        except Exception:
            log.exception("drafter %s failed: it is switched off", self._drafter.name)
            self._drafter = None
            return None

    def _history(self, row: int) -> np.ndarray:
        tokens, count = self._histories[row]
        return tokens[:count]

    def _extend(self, row: int, *parts: np.ndarray) -> None:
        tokens, count = self._histories.get(row, (np.zeros(_FIRST, dtype=np.int64), 0))
        added = np.concatenate(parts)
        if count + len(added) > len(tokens):
            wider = np.zeros(2 * (count + len(added)), dtype=np.int64)
            wider[:count] = tokens[:count]
            tokens = wider
        tokens[count : count + len(added)] = added
        self._histories[row] = tokens, count + len(added)


def _room(table: np.ndarray, size: int) -> np.ndarray:
    """[rows]: how many tokens each has blocks for; table: [rows, blocks]."""
    held = table.shape[1] - (table[:, ::-1] != 0).argmax(axis=1)
    room: np.ndarray = np.where(table.any(axis=1), held, 0) * size
    return room


def _plan_of(runs: Runs, plan: Plan, places: Mapping[int, int]) -> Plan:
    """A plan that runs other tokens of rows that are in `plan`."""
    tables = plan.tables
    if runs.rows is not plan.rows:
        at = [places[row] for row in runs.rows.tolist()]
        tables = tuple(table[at] for table in tables)
    return evolve(
        plan,
        rows=runs.rows,
        starts=runs.starts,
        counts=runs.counts,
        tokens=runs.tokens,
        tables=tables,
        drafted=None,
        state_slots=(),
    )
