"""The scheduler's half: pins the blocks of prefixes that requests mark."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from modulm.contracts.executor import GroupCapacity
from modulm.contracts.requests import Request
from modulm.contracts.step_part import PartPlanner, PlannerContext, WaitingRequest
from modulm_prefix_retention.holdings import Holding, Holdings
from modulm_prefix_retention.marks import Mark, key_of, marks_of

__all__ = ["RetentionPlanner"]

#: Seconds between looks for what has expired.
_PAUSE = 1.0
#: State slots that one sequence needs: one read, one written, one whose release lags behind.
_SLOTS = 3


@frozen(eq=False)
class _Pending:
    """A running row with marks. chains: names of its blocks, by block size."""

    request: Request
    marks: tuple[Mark, ...]
    chains: Any


class RetentionPlanner(PartPlanner):
    """Holds marked prefixes once they are computed, within a share of each block pool.

    What is held leaves room for one sequence of the maximum length, so that every request can run.
    Expired holdings are released when steps run. clock: monotonic seconds.
    """

    def __init__(
        self,
        context: PlannerContext,
        share: float,
        per_key: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._clock = context.cache, clock
        groups = context.capacity.groups
        longest, chunk = context.capacity.max_model_len, context.limits.tokens
        limits = [_limit(group, share, longest, chunk) for group in groups]
        key_limits = [int(limit * per_key) for limit in limits]
        self._holdings = Holdings(limits, key_limits, self._release)
        # A prefix that is longer than its key's share is held as far as it fits.
        self._most = min(
            (
                limit * group.block_size
                for group, limit in zip(groups, key_limits, strict=True)
                if group.window is None and group.kind == "attention"
            ),
            default=longest,
        )
        self._pending: dict[int, _Pending] = {}
        #: Request -> [tokens held, seconds] of each of its marks, for its next event.
        self._answers: dict[str, list[list[float]]] = {}
        self._next = 0.0

    def check(self, request: Request) -> None:
        marks_of(request)
        key_of(request)

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        request, chains = waiting.request, waiting.chains
        if not (chains and request.reads_prefix):
            return
        self._expire()
        if len(self._holdings):
            now = self._clock()
            for name in chains[0].names:
                self._holdings.use(name, now)
        if marks := marks_of(request):
            self._pending[row] = _Pending(request, marks, chains)

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        if not self._pending:
            return
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            pending = self._pending.get(row)
            # The last token of a prompt is always computed; its block is complete earlier.
            if pending is not None and end >= pending.marks[-1].tokens:
                del self._pending[row]
                self._retain(pending)

    def _retain(self, pending: _Pending) -> None:
        """Hold what the row's marks name; remember what became of it."""
        self._expire()
        request = pending.request
        names = {chain.size: chain.names for chain in pending.chains}
        tenant, key, now = request.tenant, key_of(request), self._clock()
        ends = []
        for mark in pending.marks:
            prefix = self._cache.lookup(names, min(mark.tokens, self._most))
            if not prefix.tokens:
                ends.append(b"")
                continue
            chain = pending.chains[0]
            name = chain.names[prefix.tokens // chain.size - 1]
            # A window's blocks for this end are not those for a repetition of the whole prompt,
            # whose last token is computed.
            again = self._cache.lookup(names, min(prefix.tokens, request.prompt_len - 1))
            blocks = tuple(
                tuple(dict.fromkeys((*ids, *others)))
                for ids, others in zip(prefix.blocks, again.blocks, strict=True)
            )
            for group, ids in zip(self._cache.groups, blocks, strict=True):
                group.pin(ids)
            until = now + mark.seconds
            self._holdings.put(
                name, Holding(tenant, key, prefix.tokens, blocks, mark.seconds, until)
            )
            ends.append(name)
        self._answers[request.id] = [
            [self._holdings.tokens(name), mark.seconds]
            for name, mark in zip(ends, pending.marks, strict=True)
        ]

    def _release(self, blocks: tuple[tuple[int, ...], ...]) -> None:
        for group, ids in zip(self._cache.groups, blocks, strict=True):
            group.unpin(ids)

    def _expire(self) -> None:
        now = self._clock()
        if now >= self._next:
            self._next = now + _PAUSE
            self._holdings.expire(now)

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        if not self._answers:
            return {}
        answers, self._answers = self._answers, {}
        return {"retained": answers}

    def release(self, request: Request, row: int) -> None:
        self._pending.pop(row, None)

    def forget(self, idle: bool) -> None:
        self._holdings.clear()


def _limit(group: GroupCapacity, share: float, longest: int, chunk: int) -> int:
    """Return how many of the group's blocks may be held."""
    if group.kind == "state":
        needed = _SLOTS
    else:
        needed = -(-longest // group.block_size) + 1
        if group.window is not None:
            # A window and the chunks of two steps may all straddle blocks.
            seen = -(-(group.window + 2 * chunk) // group.block_size) + 2
            needed = min(needed, seen)
    free = group.blocks - 1
    return max(0, min(int(share * free), free - needed))
