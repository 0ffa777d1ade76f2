"""Turns changes of the prefix cache into events.

Events are arrays here (see `events`). Their fields, in order, as in vLLM's documentation (trailing
ones may be absent):

- BlockStored: block hashes, hash of the block before them or None, their token ids, tokens per
  block, None, medium, adapter or None, and, if blocks depend on more than tokens, what else each
  depends on.
- BlockRemoved: block hashes, medium.
- AllBlocksCleared.

A hash is the last 64 bits of a block's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from modulm.contracts.requests import Request
from modulm.contracts.step_part import PartPlanner, PlannerContext, WaitingRequest
from modulm.errors import ConfigError

__all__ = ["EventsPlanner"]

#: vLLM's word for the cache that the model computes with, on any device.
_MEDIUM = "GPU"


def _hash(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")


class EventsPlanner(PartPlanner):
    """Watches one cache group: the first with full attention, or else the first of all.

    publish: receives the events of each step, if there are any. Raises ConfigError if the engine
    does not cache prefixes.
    """

    publish: Callable[[Sequence[Any]], None]

    def __init__(self, context: PlannerContext) -> None:
        if not context.prefixes.enabled:
            message = "there is no prefix cache: the model has none, or --no-enable-prefix-caching"
            raise ConfigError("kv_events_config", message)
        self._rows, self._prefixes = context.rows, context.prefixes
        self._size = context.cache.sizes[0]
        pairs = zip(context.capacity.groups, context.cache.groups, strict=True)
        named = [pair for pair in pairs if pair[0].block_size == self._size]
        whole = [pair for pair in named if pair[0].kind == "attention" and pair[0].window is None]
        (whole or named)[0][1].watch(self._changed)
        self._events: list[Any] = []
        #: Blocks that are in the index but not yet in an event.
        self._new: set[bytes] = set()
        #: Row -> its request, and how many of its blocks were looked at.
        self._requests: dict[int, Request] = {}
        self._seen: dict[int, int] = {}

    def _changed(self, name: bytes, stored: bool) -> None:
        if stored:
            self._new.add(name)
        elif name in self._new:
            self._new.discard(name)
        elif self._events and self._events[-1][0] == "BlockRemoved":
            self._events[-1][1].append(_hash(name))
        else:
            self._events.append(["BlockRemoved", [_hash(name)], _MEDIUM])

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        self._requests[row] = waiting.request

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        if self._new:
            for row, full in zip(rows.tolist(), (ends // self._size).tolist(), strict=True):
                self._collect(row, full)
        self._flush()

    def release(self, request: Request, row: int) -> None:
        if self._new:
            self._collect(row, len(self._prefixes.names(row)))
        self._requests.pop(row, None)
        self._seen.pop(row, None)
        self._flush()

    def forget(self, idle: bool) -> None:
        self._new.clear()
        self._events.append(["AllBlocksCleared"])
        self._flush()

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self.publish(events)

    def _collect(self, row: int, full: int) -> None:
        """Add events for the new ones of the row's first `full` blocks, one for each run."""
        names = self._prefixes.names(row)[:full]
        first = index = self._seen.get(row, 0)
        for index in range(first, len(names) + 1):
            if index < len(names) and names[index] in self._new:
                continue
            if index > first:
                self._events.append(self._stored(row, names, first, index))
            first = index + 1
        self._seen[row] = index

    def _stored(self, row: int, names: Sequence[bytes], first: int, last: int) -> list[Any]:
        """Return the event of the row's blocks from `first` to `last`."""
        size, request = self._size, self._requests[row]
        self._new.difference_update(names[first:last])
        event = [
            "BlockStored",
            [_hash(name) for name in names[first:last]],
            _hash(names[first - 1]) if first else None,
            self._rows.tokens[row, first * size : last * size].tolist(),
            size,
            None,
            _MEDIUM,
            request.adapter,
        ]
        keys = [_keys(request, index * size, (index + 1) * size) for index in range(first, last)]
        return [*event, keys] if any(keys) else event


def _keys(request: Request, start: int, end: int) -> list[str] | None:
    """Return what the block of tokens [start, end) depends on besides its tokens.

    Salts are secrets of tenants: a digest stands for them.
    """
    keys = [] if request.adapter is None or end <= request.adapter_from else [request.adapter]
    keys += [
        item.digest(start, end).hex()
        for item in request.media
        if item.start < end and item.start + item.length > start
    ]
    if request.salt is not None and not start:
        keys.append(hashlib.sha256(request.salt.encode()).hexdigest())
    return keys or None
