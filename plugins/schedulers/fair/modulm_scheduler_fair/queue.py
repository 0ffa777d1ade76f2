"""The waiting requests of each tenant, in a queue of their own."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from modulm_scheduler_fair.accounts import Accounts
from modulm_scheduler_fair.background import Background

if TYPE_CHECKING:
    from modulm.contracts.policy import Candidate
    from modulm.contracts.step_part import WaitingRequest

__all__ = ["FairQueue", "order"]

#: Requests of a tenant that a step may skip while other tenants wait.
_LOOK = 16
#: Length from which a heap is searched for removed requests.
_STALE = 64


def order(request: Candidate) -> tuple[float, float]:
    """Return the sort key among the requests of one tenant: priority, then arrival."""
    return request.priority, request.arrival


class FairQueue:
    """A heap for each tenant with waiting requests. The tenant with the lowest level is next, but
    while background requests wait for others, those are.

    Requests that a step skips are put back at its end. While others wait, a tenant with many of
    them is passed over, so that requests that cannot start hold up only their own tenant.
    """

    def __init__(self, accounts: Accounts, background: Background) -> None:
        self._accounts = accounts
        self._background = background
        self._heaps: dict[int, list[tuple[tuple[float, float], int, WaitingRequest]]] = {}
        #: The queued requests; other entries of the heaps have been removed.
        self._queued: dict[str, WaitingRequest] = {}
        self._skipped: dict[int, int] = {}
        self._next: WaitingRequest | None = None

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def tokens(self) -> int:
        """Tokens of all waiting requests."""
        return int(self._accounts.waiting.sum())

    def load(self, tenant: str) -> tuple[int, int]:
        """Return the tenant's waiting requests and tokens, times the tenants with waiting ones.

        So each of n tenants may fill an n-th of the queue, and nobody else's requests refuse one
        of a tenant that has none there.
        """
        accounts = self._accounts
        number = accounts.find(tenant)
        if number is None:
            return 0, 0
        requests = int(accounts.requests[number])
        tenants = len(self._heaps) or 1
        return requests * tenants, int(accounts.waiting[number]) * tenants

    def push(self, entry: WaitingRequest) -> None:
        request = entry.request
        number = self._accounts.number(request.tenant, request.weight)
        heap = self._heaps.setdefault(number, [])
        heapq.heappush(heap, (order(request), entry.order, entry))
        self._queued[request.id] = entry
        self._count(number, entry, 1)
        self._background.arrived(request)
        skipped = self._skipped.get(number)
        if skipped:
            self._skipped[number] = skipped - 1

    def peek(self) -> WaitingRequest | None:
        turns = sorted(self._heaps, key=self._accounts.turn)
        background, last = self._background, None
        self._next = None
        for number in turns:
            if len(turns) == 1 or self._skipped.get(number, 0) < _LOOK:
                entry = self._first(number)
                if entry is None:
                    continue
                if not (background.waits and background.has(entry.request)):
                    self._next = entry
                    return entry
                last = last or entry
        # A request that nothing runs beside may have to wait for something else.
        self._next = None if background.running else last
        return self._next

    def _first(self, number: int) -> WaitingRequest | None:
        """Return the tenant's next request; drops removed ones, and an empty heap."""
        heap = self._heaps[number]
        while heap:
            entry = heap[0][2]
            if self._queued.get(entry.request.id) is entry:
                return entry
            heapq.heappop(heap)
        del self._heaps[number]
        return None

    def pop(self) -> WaitingRequest:
        entry, self._next = self._next, None
        if entry is None:
            raise IndexError("`peek` returned no request")
        number = self._accounts.number(entry.request.tenant)
        heapq.heappop(self._heaps[number])
        if entry.row is None:
            self._skipped[number] = self._skipped.get(number, 0) + 1
        self._drop(number, entry)
        return entry

    def remove(self, entry: WaitingRequest) -> None:
        self._drop(self._accounts.number(entry.request.tenant), entry)

    def _drop(self, number: int, entry: WaitingRequest) -> None:
        del self._queued[entry.request.id]
        self._count(number, entry, -1)
        left, heap = self._accounts.requests[number], self._heaps.get(number, [])
        if not left:
            self._heaps.pop(number, None)
        elif len(heap) > _STALE and left < len(heap) // 2:
            self._heaps[number] = [
                item for item in heap if self._queued.get(item[2].request.id) is item[2]
            ]
            heapq.heapify(self._heaps[number])

    def _count(self, number: int, entry: WaitingRequest, sign: int) -> None:
        self._accounts.requests[number] += sign
        self._accounts.waiting[number] += sign * entry.tokens
