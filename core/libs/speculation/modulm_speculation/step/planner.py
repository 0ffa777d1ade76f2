"""The scheduler's half: drafts proposed for a row are verified in its next step.

A row is not planned again before its last result has arrived, which contains its drafts. Drafts
only use what is left of the token budget and of the blocks.

A row may get fewer tokens than its tree has drafts, since only one path is accepted: the depth of a
tree is limited by the tokens that are left, its size by slots. Slots behind the row's end are
returned with the step's result.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from modulm.contracts.executor import PartReport, Plan
from modulm.contracts.requests import Request
from modulm.contracts.step_part import PartPlanner, PlannerContext, StepDraft

__all__ = ["DraftPlanner"]


class DraftPlanner(PartPlanner):
    """Plans drafts within the runner's capacity.

    drafts: maximum per row and step. ahead: tokens after a step's last one that rows should have
    blocks for.
    """

    one_at_a_time = True

    def __init__(self, context: PlannerContext) -> None:
        self._most = int(context.values["drafts"])
        self._ahead = int(context.values["ahead"])
        self._vocabulary = context.capacity.vocabulary
        self._table = context.rows
        self._cache = context.cache
        self._proposals: Mapping[int, np.ndarray] = {}
        self._counts = np.zeros(context.rows.rows, dtype=np.int64)
        self._tokens = np.zeros((context.rows.rows, self._most), dtype=np.int32)
        #: Row -> the parents of its drafts, if they are a tree.
        self._parents: dict[int, list[int]] = {}
        #: Rows with slots behind their end.
        self._beyond = set[int]()

    def receive(self, plan: Plan, report: PartReport) -> None:
        self._proposals = report.value

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        """Store the drafts of rows that continue, up to the first invalid token id."""
        if self._beyond:
            self._shorten(self._beyond.intersection(rows.tolist()))
        if not self._proposals:
            return
        proposals, self._proposals = self._proposals, {}
        alive = set(owners.tolist())
        for row, proposed in proposals.items():
            if row not in alive:
                continue
            self._parents.pop(row, None)
            tokens = np.asarray(proposed)[..., : self._most]
            if tokens.ndim == 2:
                self._parents[row] = tokens[1].tolist()
                tokens = tokens[0]
            wrong = np.flatnonzero((tokens < 0) | (tokens >= self._vocabulary))
            count = int(wrong[0]) if len(wrong) else len(tokens)
            self._counts[row] = count
            self._tokens[row, :count] = tokens[:count]

    def release(self, request: Request, row: int) -> None:
        self._counts[row] = 0
        self._parents.pop(row, None)
        self._beyond.discard(row)

    def plan(self, step: StepDraft, left: int) -> Mapping[int, list[int]] | None:
        """Add drafts to the step's decoding rows; return row -> the parents of those in trees."""
        if not len(step.rows):
            return None
        self._add(step, left)
        if self._ahead:
            ends = step.starts + step.counts + self._ahead
            if step.drafted is not None:
                ends = ends + step.drafted
            self._cache.reserve(step.rows, np.minimum(ends, self._table.limit[step.rows]))
        if not self._parents or step.drafted is None:
            return None
        return {
            row: self._parents[row][:count]
            for row, count in zip(step.rows.tolist(), step.drafted.tolist(), strict=True)
            if count and row in self._parents
        } or None

    def _add(self, step: StepDraft, left: int) -> None:
        table, rows = self._table, step.rows
        if not self._counts[rows].any():
            step.state_slots = ()
            return
        lengths = table.length[rows]
        decodes = (step.counts == 1) & (step.starts + 1 == lengths)
        ends = self._ends(rows, lengths)
        drafts = np.where(decodes, self._counts[rows], 0)
        drafts = np.clip(ends - lengths, 0, drafts)
        drafts = np.clip(left - (np.cumsum(drafts) - drafts), 0, drafts)
        if drafts.any() and not self._cache.grow(rows, step.starts + step.counts + drafts):
            drafts = np.clip(self._cache.room(rows) - lengths, 0, drafts)
        if drafts.any():
            drafts, step.state_slots = self._cache.lend(rows, drafts, step.starts)
        self._counts[rows[decodes]] = 0
        if not drafts.any():
            step.state_slots = ()
            return
        owners = np.repeat(rows, drafts)
        ramp = np.arange(len(owners)) - np.repeat(np.cumsum(drafts) - drafts, drafts)
        table.tokens[owners, np.repeat(lengths, drafts) + ramp] = self._tokens[owners, ramp]
        step.drafted = drafts
        step.one_each = False
        if self._parents:
            self._beyond.update(rows[lengths + drafts > table.limit[rows]].tolist())

    def _ends(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return where the rows' drafts end at the latest: [rows]. Shortens trees that are deeper.

        The last token of a row is not a draft.
        """
        ends: np.ndarray = self._table.limit[rows] - 1
        for index in np.flatnonzero(self._counts[rows] > ends - lengths).tolist():
            row = int(rows[index])
            if row in self._parents:
                self._cut(row, int(ends[index] - lengths[index]))
                if self._cache.uniform:
                    ends[index] = self._table.tokens.shape[1] - 1
        return ends

    def _cut(self, row: int, depth: int) -> None:
        """Drop the drafts of a row's tree that have at least `depth` others before them."""
        count = int(self._counts[row])
        depths, numbers = {0: 0}, {0: 0}
        kept, parents = list[int](), list[int]()
        for draft, parent in enumerate(self._parents[row][:count]):
            if depths.get(parent, depth) < depth:
                kept.append(draft)
                parents.append(numbers[parent])
                depths[draft + 1], numbers[draft + 1] = depths[parent] + 1, len(kept)
        self._parents[row] = parents
        self._tokens[row, : len(kept)] = self._tokens[row, kept]
        self._counts[row] = len(kept)

    def _shorten(self, rows: set[int]) -> None:
        """Release the blocks behind the rows' ends."""
        self._beyond -= rows
        size = self._cache.sizes[0]
        for row in rows:
            end = -(-int(self._table.limit[row]) // size) * size
            if int(self._cache.room(np.array([row]))[0]) > end:
                for group in self._cache.groups:
                    group.shorten(row, end)
