"""Builds the tensors of a step from its plan, vectorized over rows, in reused buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import evolve, frozen

from modulm.contracts.attention import AttentionBackend, AttentionPlan, AttentionSpec, StepLayout
from modulm.contracts.executor import PENDING, Plan
from modulm.contracts.model import Batch, StatePlan
from modulm.errors import EngineError, UnsupportedError

if TYPE_CHECKING:
    from modulm.contracts.platform import Platform
    from modulm.engine.sampling.sampler import Chosen
    from modulm.loading import CacheGroup
    from modulm.parallel import Mesh

__all__ = ["BatchBuilder", "GroupPlanner", "Runs", "alone", "cross_layout"]

#: Cross-attention inputs of a row: for each item of each run (see `crossed_runs`), the first token
#: that reads it and its number of encoder outputs.
Runs = Sequence[Sequence[tuple[int, int]]]


def alone(plan: Plan, *, whole: bool) -> Iterator[Plan]:
    """Split a step into plans of one token each, or of one row each if `whole`.

    Each token's result then depends only on earlier tokens of its row, never on other rows.
    """
    first = 0
    for index, count in enumerate(plan.counts.tolist()):
        tables = tuple(table[index : index + 1] for table in plan.tables)
        row, start = plan.rows[index : index + 1], plan.starts[index : index + 1]
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
                    None if slots is None else slots[index : index + 1, offset : offset + size]
                    for slots in plan.state_slots
                ),
            )
        first += count


@frozen
class GroupPlanner:
    """Builds one of a batch's plans. backend: None for groups of recurrent states.

    table: index of the cache group whose block table it reads.
    """

    block_size: int
    backend: AttentionBackend | None
    table: int

    @classmethod
    def all(
        cls, groups: Sequence[CacheGroup], places: Sequence[int] | None = None
    ) -> tuple[GroupPlanner, ...]:
        """Create one per group, then one per backend of layers that follow a group's block table.

        places: indices of the groups among those of all ranks (`Plan.tables`).
        """
        at = range(len(groups)) if places is None else places
        own = [cls(g.block_size, g.backend, index) for g, index in zip(groups, at, strict=True)]
        followers = [
            cls(g.block_size, backend, index)
            for g, index in zip(groups, at, strict=True)
            for backend, _ in g.followers
        ]
        return (*own, *followers)


class BatchBuilder:
    """Builds the `Batch` of each step, and stores the last token of every row on the device.

    rows, tokens: maximum rows and tokens of a step. caches, owners: the cache of each layer with
    one and its group, in the model's order. amend: step parts' `amend_layout` methods.
    """

    def __init__(
        self,
        groups: Sequence[GroupPlanner],
        caches: Sequence[Any],
        owners: Sequence[int],
        *,
        rows: int,
        tokens: int,
        platform: Platform,
        amend: Sequence[Callable[[Plan, AttentionSpec, StepLayout], StepLayout]] = (),
    ) -> None:
        self.groups = tuple(groups)
        self.caches = tuple(caches)
        self.owners = tuple(owners)
        self._rows, self._platform = rows, platform
        self._amend = tuple(amend)
        self._fixed = platform.step_sizes(rows, tokens) is not None
        self._queued = platform.queued
        self._staging = platform.staging()
        # On devices that queue work the last tokens stay there; otherwise this is a view.
        self._last = torch.full((rows,), PENDING, dtype=torch.int64, device=platform.device)
        self._last_here = None if self._queued else self._last.numpy()
        # The rows of the last `keep` and, on devices that queue work, their copy on the device.
        self._kept: tuple[np.ndarray, torch.Tensor | None] = (np.zeros(0, np.int64), None)
        self._limit = tokens
        self._ramp = np.arange(max(tokens, rows) + 1, dtype=np.int64)
        self._tokens = np.zeros(tokens, dtype=np.int64)
        self._positions = np.zeros(tokens, dtype=np.int64)
        self._slots = np.zeros((len(self.groups), tokens), dtype=np.int64)
        self._query_starts = np.zeros(rows + 1, dtype=np.int32)

    def part(self, caches: slice, *, amended: bool = False) -> BatchBuilder:
        """Create a builder for a part of the caches, with its own buffers.

        amended: whether step parts amend its layouts.
        """
        owners = self.owners[caches]
        used = sorted(set(owners))
        return BatchBuilder(
            [self.groups[owner] for owner in used],
            self.caches[caches],
            [used.index(owner) for owner in owners],
            rows=self._rows,
            tokens=self._limit,
            platform=self._platform,
            amend=self._amend if amended else (),
        )

    def padded(
        self, plan: Plan, sample: np.ndarray, counts: np.ndarray, samples: int = 0, reach: int = 0
    ) -> tuple[Plan, np.ndarray]:
        """Append padding rows in null blocks to a plan, and pad `sample`.

        counts: [rows] int32, tokens of all rows including padding. samples: length of the padded
        `sample`, by default one per row. reach: minimum number of tokens that block tables cover.
        """
        more = len(counts) - len(plan.counts)
        if not (more or samples):
            return plan, sample
        padding = counts[len(plan.counts) :]
        rows, tokens = (0, more), (0, int(padding.sum()))
        longest = max(int(padding.max(initial=0)), reach)
        least = -(-longest // min((g.block_size for g in self.groups), default=1))
        wider = evolve(
            plan,
            rows=np.pad(plan.rows, rows, constant_values=-1),
            starts=np.pad(plan.starts, rows),
            counts=counts,
            tokens=np.pad(plan.tokens, tokens),
            tables=tuple(
                np.pad(table, (rows, (0, max(least - table.shape[1], 0)))) for table in plan.tables
            ),
            samples=np.pad(plan.samples, rows),
            state_slots=tuple(
                None if slots is None else np.pad(slots, (rows, (0, 0)))
                for slots in plan.state_slots
            ),
        )
        return wider, np.pad(sample, (0, max((samples or len(counts)) - len(sample), 0)))

    def build(self, plan: Plan, sample: np.ndarray) -> Batch:
        """Build the tensors of `plan`; they are valid until the next call.

        sample: [n] int64, indices of the step's tokens that need logits.
        """
        rows, count = len(plan.rows), len(plan.tokens)
        if count > self._limit or rows >= len(self._query_starts):
            raise EngineError(
                f"a step of {rows} rows and {count} tokens exceeds the buffers "
                f"({len(self._query_starts) - 1} rows, {self._limit} tokens)"
            )
        query_starts = self._query_starts[: rows + 1]
        np.cumsum(plan.counts, out=query_starts[1:])
        # Row index of each token; a step of single tokens needs no repetition.
        owners = self._ramp[:rows] if count == rows else np.repeat(self._ramp[:rows], plan.counts)
        positions = self._positions[:count]
        np.add(self._ramp[:count], (plan.starts - query_starts[:-1])[owners], out=positions)
        tokens, holes = self._resolve(plan, owners)
        ids, *tensors = self._staging.send((tokens, positions, query_starts, sample, *holes))
        if holes:
            at, of = tensors[3:]
            last = self._last[of].clamp_(min=0)
            if len(of) == count and not self._fixed:
                ids = last
            else:
                ids[at] = last
        return Batch(
            tokens=ids,
            positions=tensors[0],
            query_starts=tensors[1],
            caches=self.caches,
            plans=self._plans(plan, owners, positions, query_starts),
            groups=self.owners,
            sample=tensors[2],
        )

    def copy_tokens(
        self, plan: Plan, places: np.ndarray, sources: np.ndarray, targets: np.ndarray
    ) -> None:
        """See `BatchFactory.copy_tokens`. Caches shared by several layers are copied once."""
        caches = {
            id(cache): (cache, owner) for cache, owner in zip(self.caches, self.owners, strict=True)
        }
        before, slots = -1, tuple[torch.Tensor, ...]()
        for cache, owner in sorted(caches.values(), key=lambda each: each[1]):
            group = self.groups[owner]
            if group.backend is None:
                raise UnsupportedError("a recurrent state holds no single tokens")
            table, size = plan.tables[group.table], group.block_size
            if owner != before:
                slots = self._staging.send(tuple(
                    table[places, at // size].astype(np.int64) * size + at % size
                    for at in (sources, targets)
                ))  # fmt: skip
            before = owner
            group.backend.copy_slots(cache, *slots)

    def keep(self, rows: np.ndarray, chosen: Chosen | np.ndarray) -> None:
        """Store the rows' last tokens: [rows], -1 if sampling failed."""
        if self._last_here is not None:
            tokens = chosen if isinstance(chosen, np.ndarray) else chosen.tokens()
            self._last_here[rows] = tokens
            return
        before, at = self._kept
        if at is None or not np.array_equal(rows, before):
            at = self._staging.send((rows.astype(np.int64),))[0].clone()
            self._kept = rows.copy(), at
        if isinstance(chosen, np.ndarray):
            (last,) = self._staging.send((chosen,))
        else:
            last = chosen.device
        self._last[at] = last

    def share(self, plan: Plan, mesh: Mesh) -> None:
        """Broadcast the last tokens to all ranks if the plan has pending ones."""
        if mesh.world.size > 1 and (plan.tokens == PENDING).any():
            source = mesh.world.size - mesh.tensor.size
            self._last.copy_(mesh.world.broadcast(self._last, source))

    def _resolve(self, plan: Plan, owners: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Replace pending tokens by the rows' last tokens: [tokens].

        On devices that queue work these are not known on the host; their indices and rows are then
        returned as well. Failed rows have no last token; their results are discarded.
        """
        tokens = self._tokens[: len(plan.tokens)]
        tokens[:] = plan.tokens
        holes = np.flatnonzero(tokens == PENDING)
        if not len(holes):
            return tokens, ()
        rows = plan.rows[owners[holes]]
        if self._last_here is None:
            if self._fixed:
                more = (0, len(plan.rows) - len(holes))
                holes, rows = np.pad(holes, more, "edge"), np.pad(rows, more, "edge")
            return tokens, (holes, rows.astype(np.int64))
        tokens[holes] = np.maximum(self._last_here[rows], 0)
        return tokens, ()

    def _plans(
        self, plan: Plan, owners: np.ndarray, positions: np.ndarray, query_starts: np.ndarray
    ) -> tuple[AttentionPlan | StatePlan, ...]:
        context_lens = (plan.starts + plan.counts).astype(np.int32)
        plans: list[AttentionPlan | StatePlan] = []
        for index, group in enumerate(self.groups):
            table = plan.tables[group.table]
            if group.backend is None:
                drafts = plan.state_slots[group.table] if plan.state_slots else None
                plans.append(self._state_plan(plan, table, query_starts, group.block_size, drafts))
                continue
            spec, size = group.backend.spec, group.block_size
            if spec.cross:
                slots = self._slots[index, :0]
            else:
                slots = self._slots[index, : len(positions)]
                np.multiply(table[owners, positions // size], size, out=slots)
                slots += positions % size
            layout = StepLayout(size, table, query_starts, context_lens, slots)
            for amend in self._amend:
                layout = amend(plan, spec, layout)
            if spec.cross and layout.encoder_lens is None:
                layout = cross_layout(plan, table, size)
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
        """Build the plan of a state group, whose blocks hold the state after their last token.

        drafts: as in `Plan.state_slots`.
        """
        rows, first = self._ramp[: len(plan.rows)], plan.starts // size
        last = (plan.starts + plan.counts - 1) // size
        saves = [
            (row, (block + 1) * size - int(plan.starts[row]), int(table[row, block]))
            for row in (last > first).nonzero()[0].tolist()
            for block in range(first[row], last[row])
            if table[row, block]
        ]
        if drafts is not None:
            places, ats = drafts.nonzero()
            slots = drafts[places, ats].tolist()
            saves += zip(places.tolist(), (ats + 1).tolist(), slots, strict=True)
        before = np.maximum(plan.starts - 1, 0) // size
        targets, sources = (table[rows, at].astype(np.int64) for at in (last, before))
        slots, came, fresh, starts = self._staging.send(
            (targets, sources, plan.starts == 0, query_starts)
        )
        return StatePlan(
            slots=slots,
            fresh=fresh,
            query_starts=starts,
            counts=tuple(plan.counts.tolist()),
            starts=tuple(plan.starts.tolist()) if plan.counts.max() > 1 else (),
            sources=came,
            saves=tuple(saves),
        )


def cross_layout(
    plan: Plan, table: np.ndarray, size: int, crossed: Sequence[Runs] = ()
) -> StepLayout:
    """Build the layout of a step for cross-attention layers.

    Rows that start in the step write their encoder's keys, each run in new blocks. Consecutive
    tokens that read the same keys form a row of the layout. Tokens that read none, and padding,
    read one key of the null block, where keys and values are zero.

    table: [rows, blocks] int32, for blocks of `size` tokens. crossed: encoder outputs of each row.
    """
    seen: list[tuple[int, int, int, int]] = []  # row, tokens, first block, keys
    written: list[np.ndarray] = [np.zeros(0, np.int64)]
    starts, ends = plan.starts.tolist(), (plan.starts + plan.counts).tolist()
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        block, at, look = 0, start, (0, 0)
        for run in crossed[row] if row < len(crossed) else ():
            keys = 0
            for first, length in run:
                if first > at:
                    seen.append((row, min(first, end) - at, *look))
                    at = min(first, end)
                keys += length
                look = (block, keys)
            if start == 0:
                places = np.arange(keys)
                blocks = table[row, block + places // size].astype(np.int64)
                written.append(blocks * size + places % size)
            block += -(-keys // size)
        seen.append((row, end - at, *look))
    rows, counts, blocks, keys = np.array([one for one in seen if one[1]], np.int32).T
    wide = table if table.shape[1] else np.zeros((len(table), 1), np.int32)
    tables = wide[rows] * (keys > 0)[:, None]
    for index in np.flatnonzero(blocks):
        own = table[rows[index], blocks[index] :]
        tables[index] = np.pad(own, (0, blocks[index]))
    query_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lens = np.maximum(keys, 1)
    return StepLayout(size, tables, query_starts, lens, np.concatenate(written), encoder_lens=lens)
