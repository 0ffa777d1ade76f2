"""From a plan to the tensors of a step: vectorised over rows, into buffers that stay in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import evolve, frozen

from modulm.contracts.attention import AttentionBackend, AttentionPlan, StepLayout
from modulm.contracts.executor import PENDING, Plan
from modulm.contracts.model import Batch, StatePlan
from modulm.errors import EngineError

if TYPE_CHECKING:
    from modulm.loading import CacheGroup

__all__ = ["BatchBuilder", "GroupPlanner", "alone"]


def alone(plan: Plan, *, whole: bool) -> Iterator[Plan]:
    """The step in parts of one token each, in order; `whole`: of one row each.

    What a token's part computes depends on its row's earlier tokens only, never on the step.
    """
    first = 0
    for place, count in enumerate(plan.counts.tolist()):
        tables = tuple(table[place : place + 1] for table in plan.tables)
        row, start = plan.rows[place : place + 1], plan.starts[place : place + 1]
        size = count if whole else 1
        for offset in range(0, count, size):
            yield evolve(
                plan,
                rows=row,
                starts=start + offset,
                counts=np.full(1, size, dtype=np.int32),
                tokens=plan.tokens[first + offset : first + offset + size],
                tables=tables,
                samples=np.ones(1, dtype=bool),
                admit=(),
                release=(),
                drafted=None,
                state_slots=tuple(
                    None if slots is None else slots[place : place + 1, offset : offset + size]
                    for slots in plan.state_slots
                ),
            )
        first += count


@frozen
class GroupPlanner:
    """What makes one of a batch's plans; `backend` is None for groups of states.

    table: the cache group whose block table it reads.
    """

    block_size: int
    backend: AttentionBackend | None
    table: int

    @classmethod
    def all(cls, groups: Sequence[CacheGroup]) -> tuple[GroupPlanner, ...]:
        """One per group, then one per backend of layers that follow a group's block table."""
        own = [cls(g.block_size, g.backend, index) for index, g in enumerate(groups)]
        followers = [
            cls(g.block_size, backend, index)
            for index, g in enumerate(groups)
            for backend, _ in g.followers
        ]
        return (*own, *followers)


class BatchBuilder:
    """Builds the `Batch` of each step and keeps the last token of every row.

    rows, tokens: most rows and tokens of a step. caches, owners: the cache of each layer that
    has one and the group it belongs to, in the model's order.
    """

    def __init__(
        self,
        groups: Sequence[GroupPlanner],
        caches: Sequence[Any],
        owners: Sequence[int],
        *,
        rows: int,
        tokens: int,
        device: torch.device,
    ) -> None:
        self.groups = tuple(groups)
        self.caches = tuple(caches)
        self.owners = tuple(owners)
        self.device = device
        self.last = np.full(rows, PENDING, dtype=np.int64)
        self._limit = tokens
        self._ramp = np.arange(max(tokens, rows) + 1, dtype=np.int64)
        self._tokens = np.zeros(tokens, dtype=np.int64)
        self._positions = np.zeros(tokens, dtype=np.int64)
        self._slots = np.zeros((len(self.groups), tokens), dtype=np.int64)
        self._query_starts = np.zeros(rows + 1, dtype=np.int32)

    def build(self, plan: Plan, sample: np.ndarray) -> Batch:
        """The tensors of `plan`. sample: [n] int64, the step's tokens whose logits are wanted.

        The tensors are valid until the next call.
        """
        rows, count = len(plan.rows), len(plan.tokens)
        if count > self._limit or rows >= len(self._query_starts):
            raise EngineError(
                f"a step of {rows} rows and {count} tokens exceeds the buffers "
                f"({len(self._query_starts) - 1} rows, {self._limit} tokens)"
            )
        query_starts = self._query_starts[: rows + 1]
        np.cumsum(plan.counts, out=query_starts[1:])
        # The step's rows, one entry per token; a step of single tokens needs no repetition.
        owners = self._ramp[:rows] if count == rows else np.repeat(self._ramp[:rows], plan.counts)
        positions = self._positions[:count]
        np.add(self._ramp[:count], (plan.starts - query_starts[:-1])[owners], out=positions)
        return Batch(
            tokens=self._tensor(self._resolve(plan, owners)),
            positions=self._tensor(positions),
            query_starts=self._tensor(query_starts),
            caches=self.caches,
            plans=self._plans(plan, owners, positions, query_starts),
            groups=self.owners,
            sample=self._tensor(sample),
        )

    def _resolve(self, plan: Plan, owners: np.ndarray) -> np.ndarray:
        """[tokens]: the plan's tokens with pending ones replaced by the rows' last tokens."""
        tokens = self._tokens[: len(plan.tokens)]
        tokens[:] = plan.tokens
        holes = np.flatnonzero(tokens == PENDING)
        if len(holes):
            found = self.last[plan.rows[owners[holes]]]
            # A row that failed has no last token; what it computes now is never looked at.
            tokens[holes] = np.maximum(found, 0)
        return tokens

    def _plans(
        self, plan: Plan, owners: np.ndarray, positions: np.ndarray, query_starts: np.ndarray
    ) -> tuple[AttentionPlan | StatePlan, ...]:
        context_lens = (plan.starts + plan.counts).astype(np.int32)
        plans: list[AttentionPlan | StatePlan] = []
        for index, group in enumerate(self.groups):
            table = plan.tables[group.table]
            if group.backend is None:
                drafts = plan.state_slots[index] if plan.state_slots else None
                plans.append(self._state_plan(plan, table, query_starts, group.block_size, drafts))
                continue
            size = group.block_size
            slots = self._slots[index, : len(positions)]
            np.multiply(table[owners, positions // size], size, out=slots)
            slots += positions % size
            layout = StepLayout(size, table, query_starts, context_lens, slots)
            plans.append(group.backend.plan(layout))
        return tuple(plans)

    def _state_plan(
        self,
        plan: Plan,
        table: np.ndarray,
        query_starts: np.ndarray,
        size: int,
        drafts: np.ndarray | None,
    ) -> StatePlan:
        """The last token so far of each block of `size` tokens left its state in the block; drafts:
        as in `Plan.state_slots`.
        """
        rows, first = self._ramp[: len(plan.rows)], plan.starts // size
        last = (plan.starts + plan.counts - 1) // size
        kept = [
            (row, (block + 1) * size - int(plan.starts[row]), int(table[row, block]))
            for row in (last > first).nonzero()[0].tolist()
            for block in range(first[row], last[row])
            if table[row, block]
        ]
        if drafts is not None:
            places, ats = drafts.nonzero()
            slots = drafts[places, ats].tolist()
            kept += zip(places.tolist(), (ats + 1).tolist(), slots, strict=True)
        before = np.maximum(plan.starts - 1, 0) // size
        return StatePlan(
            slots=self._tensor(table[rows, last].astype(np.int64)),
            fresh=self._tensor(plan.starts == 0),
            query_starts=self._tensor(query_starts),
            counts=tuple(plan.counts.tolist()),
            starts=tuple(plan.starts.tolist()) if plan.counts.max() > 1 else (),
            sources=self._tensor(table[rows, before].astype(np.int64)),
            kept=tuple(kept),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
