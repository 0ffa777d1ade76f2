"""Follows the rows of each tenant, charges their tokens, and leaves a share of each step's budget
for tenants that wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from modulm.contracts.step_part import PartPlanner
from modulm_scheduler_fair.accounts import Accounts, divide
from modulm_scheduler_fair.background import Background

if TYPE_CHECKING:
    from modulm.contracts.requests import Request
    from modulm.contracts.step_part import PlannerContext, StepDraft, WaitingRequest

__all__ = ["SharePlanner"]

#: Steps for which no tokens are kept for a tenant that did not use those it was left.
_PAUSE = 16


class SharePlanner(PartPlanner):
    """The planner of the fair policy.

    Tokens that recompute a displaced request are charged to the tenant that displaced it.
    """

    def __init__(self, accounts: Accounts, context: PlannerContext, background: Background) -> None:
        rows = context.rows.rows
        self._accounts = accounts
        self._background = background
        self._unit = context.cache.unit
        #: Prompt tokens that background requests may still join the step with; None: any number.
        self._chunk: int | None = None
        self._rows = context.rows
        self._budget, self._chunked = context.limits.tokens, context.limits.chunked
        self._tenant = np.zeros(rows, dtype=np.int64)
        #: The tenant that pays for the row's tokens up to `_paid_until`.
        self._payer = np.zeros(rows, dtype=np.int64)
        self._paid_until = np.zeros(rows, dtype=np.int64)
        #: Request -> (tenant that displaced it, tokens it has to compute again).
        self._displaced: dict[str, tuple[int, int]] = {}
        #: Running request -> its row.
        self._row: dict[str, int] = {}
        self._wants: np.ndarray | None = None
        self._kept = np.zeros(0, dtype=np.int64)
        #: Tenant -> number of the step from which tokens are kept for it again.
        self._pauses: dict[int, int] = {}

    def computed(self, request: str) -> int:
        """Return the tokens that a running request would lose with its row."""
        return int(self._rows.computed[self._row[request]])

    def displace(self, request: str, payer: int) -> None:
        """Note that the request is about to lose its row in favor of tenant `payer`."""
        self._displaced[request] = payer, 0

    # Requests.

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        request = waiting.request
        number = self._accounts.number(request.tenant, request.weight)
        self._tenant[row] = number
        self._row[request.id] = row
        self._background.admitted(request, row)
        self._payer[row], self._paid_until[row] = self._displaced.get(request.id, (0, 0))

    def joined(self, request: Request, row: int, start: int, count: int) -> None:
        number = int(self._tenant[row])
        self._accounts.joined[number] += count
        self._pauses.pop(number, None)
        if self._chunk is not None and self._background.has(request):
            self._chunk = max(self._chunk - count, 0)

    def limit(self, request: Request, start: int, count: int) -> int:
        """Bound the first chunk of a background request, if prompts may be split."""
        if self._chunk is None or not (self._chunked and self._background.has(request)):
            return count
        return min(count, self._chunk)

    def release(self, request: Request, row: int) -> None:
        del self._row[request.id]
        self._background.released(row)
        if request.id in self._displaced:
            payer, known = self._displaced[request.id]
            computed = int(self._rows.computed[row])
            self._displaced[request.id] = payer, max(known, computed)

    def finished(self, request: str) -> None:
        self._displaced.pop(request, None)
        self._background.finished(request)

    # Steps.

    def begin(self, decoding: bool) -> None:
        self._wants = None
        self._kept = np.zeros(len(self._accounts), dtype=np.int64)
        self._chunk = self._background.chunk(self._budget, self._unit)

    def sampled(self, rows: np.ndarray) -> None:
        self._background.sampled(self._rows.names[rows])

    def claim(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        accounts, tenants = self._accounts, self._tenant[rows]
        most = self._chunk if self._chunked else None
        prompts = self._background.shorten(rows, counts, most)
        if self._chunk is not None:
            self._chunk = max(self._chunk - prompts, 0)
        total = len(accounts)
        wants = np.bincount(tenants, counts, total).astype(np.int64)
        self._wants = wants
        waiting = self._for_waiting(total)
        demand = wants + waiting
        active = demand > 0
        if demand.sum() <= self._budget or np.count_nonzero(active) < 2 or not self._chunked:
            return
        weight = accounts.weight[:total]
        share = np.floor(self._budget * weight / weight[active].sum())
        decoding = np.bincount(tenants, np.minimum(counts, 1), total)
        least = np.minimum(np.minimum(decoding, share), demand)
        tokens = divide(self._budget, demand, least, accounts.level[:total], weight)
        self._kept = np.maximum(tokens - wants, 0)
        for number in np.flatnonzero(tokens < wants).tolist():
            _limit(counts, tenants == number, int(tokens[number]))

    def _for_waiting(self, total: int) -> np.ndarray:
        """Return the tokens of waiting requests to leave room for: [tenants]."""
        waiting = self._accounts.waiting[:total].copy()
        if len(self._row) == len(self._tenant):
            waiting[:] = 0  # there is no row for them
        for number in self._pauses:
            waiting[number] = 0
        return waiting

    def plan(self, step: StepDraft, left: int) -> None:
        accounts = self._accounts
        total = len(accounts)
        rows, ends = step.rows, step.starts + step.counts
        counts = step.counts if step.drafted is None else step.counts + step.drafted
        paid = np.clip(np.minimum(ends, self._paid_until[rows]) - step.starts, 0, step.counts)
        tokens = np.bincount(self._tenant[rows], counts - paid, total)
        if paid.any():
            tokens += np.bincount(self._payer[rows], paid, total)
        unmet = accounts.requests[:total] > 0
        if self._wants is not None:
            computed = np.bincount(self._tenant[rows], step.counts, total)
            unmet |= computed < self._wants_of(total)
        self._note_unused(step.number, left)
        self._background.planned()
        accounts.charge(tokens, unmet)

    def _wants_of(self, total: int) -> np.ndarray:
        """Return the tokens that running rows wanted: [tenants], also for new tenants."""
        wants = np.zeros(total, dtype=np.int64)
        if self._wants is not None:
            wants[: len(self._wants)] = self._wants
        return wants

    def _note_unused(self, step: int, left: int) -> None:
        """Pause keeping tokens for tenants that left them unused, such as for lack of blocks."""
        for number in [number for number, until in self._pauses.items() if until <= step]:
            del self._pauses[number]
        if left > 0:
            for number in np.flatnonzero(self._kept).tolist():
                if not self._accounts.joined[number]:
                    self._pauses[number] = step + _PAUSE


def _limit(counts: np.ndarray, chosen: np.ndarray, tokens: int) -> None:
    """Reduce the counts of the chosen rows to `tokens`: one for each row first, then in order."""
    wants = counts[chosen]
    each = np.minimum(wants, 1)
    each = np.clip(tokens - (np.cumsum(each) - each), 0, each)
    rest = wants - each
    before = np.cumsum(rest) - rest
    counts[chosen] = each + np.clip(tokens - int(each.sum()) - before, 0, rest)
