"""Request queue: waiting requests in the order of a policy."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from modulm.contracts.policy import Policy
from modulm.contracts.requests import Request
from modulm.engine.kv_cache.prefix_index import Chain

__all__ = ["Entry", "RequestQueue"]


class Entry:
    """A request inside the scheduler.

    order: of arrival, breaks ties. limit: maximum tokens, including the prompt. row: None while it
    waits. history: [tokens] int64, its tokens while it waits (again). chains: names of its full
    blocks, one chain per block size. overtaken: later requests that were admitted while a step part
    deferred it.
    """

    __slots__ = (
        "chains", "gone", "history", "key", "limit", "order", "overtaken", "preemptions", "request",
        "row",
    )  # fmt: skip

    def __init__(self, request: Request, order: int, limit: int) -> None:
        self.request = request
        self.order = order
        self.limit = limit
        self.row: int | None = None
        self.history: np.ndarray = request.prompt
        self.chains: tuple[Chain, ...] = ()
        self.overtaken = self.preemptions = 0
        self.gone = False
        self.key: Any = None

    @property
    def tokens(self) -> int:
        """Number of tokens to compute on admission."""
        return len(self.history)


class RequestQueue:
    """A heap by the policy's key, then order of arrival. Removal is lazy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Any, int, Entry]] = []
        self.count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self.count

    def load(self, tenant: str) -> tuple[int, int]:
        """Return the number of waiting requests and of their tokens."""
        return self.count, self.tokens

    def push(self, entry: Entry) -> None:
        """Queue an entry; a preempted request returns to its former position."""
        if entry.key is None:
            entry.key = self._policy.key(entry.request)
        heapq.heappush(self._heap, (entry.key, entry.order, entry))
        self.count += 1
        self.tokens += entry.tokens

    def peek(self) -> Entry | None:
        """Return the next entry without removing it."""
        while self._heap and self._heap[0][2].gone:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Entry:
        """Remove the entry that `peek` returned."""
        entry = heapq.heappop(self._heap)[2]
        self.count -= 1
        self.tokens -= entry.tokens
        return entry

    def remove(self, entry: Entry) -> None:
        """Remove a queued entry; it leaves the heap when it reaches the top."""
        entry.gone = True
        self.count -= 1
        self.tokens -= entry.tokens
        if len(self._heap) > 64 and self.count < len(self._heap) // 2:
            self._heap = [item for item in self._heap if not item[2].gone]
            heapq.heapify(self._heap)
