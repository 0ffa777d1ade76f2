"""Which stored blocks are held for requests: see `modulm_prefix_retention`."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from attrs import frozen

from modulm.contracts.connector import BlockHold
from modulm.contracts.requests import Request
from modulm_prefix_retention.holdings import Holding, Holdings
from modulm_prefix_retention.marks import Mark, key_of, marks_of

__all__ = ["HeldBlocks", "PrefixHolds"]

#: Prefixes whose use is noticed in requests that do not mark them.
_REMEMBERED = 1 << 12


@frozen(eq=False)
class _Marked:
    """A running row whose prompt has marks. names: of its units."""

    request: Request
    marks: tuple[Mark, ...]
    names: tuple[bytes, ...]


class PrefixHolds:
    """The scheduler's half: turns marks of requests into `BlockHold`s. size: tokens of a name.

    A prefix is held once it is computed, and again with each use.
    """

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._clock = size, clock
        self._marked: dict[int, _Marked] = {}
        self._new: list[BlockHold] = []
        #: Last name of a prefix -> its hold, and when that ends unless it is used.
        self._held: OrderedDict[bytes, tuple[BlockHold, float]] = OrderedDict()

    def admit(self, request: Request, row: int, names: Sequence[bytes]) -> None:
        """Note a row that starts. names: of its units."""
        if self._held:
            now = self._clock()
            for name in names:
                hold, until = self._held.get(name, (None, 0.0))
                if hold is not None and until > now:
                    self._add(hold)
        if marks := marks_of(request):
            self._marked[row] = _Marked(request, marks, tuple(names))

    def settle(self, row: int, end: int) -> None:
        """Hold what the row has marked, if its first `end` tokens have all of it."""
        marked = self._marked.get(row)
        if marked is None or end < marked.marks[-1].tokens:
            return
        del self._marked[row]
        for mark in marked.marks:
            names = marked.names[: mark.tokens // self._size]
            if names:
                request = marked.request
                self._add(BlockHold(names, mark.seconds, request.tenant, key_of(request)))

    def _add(self, hold: BlockHold) -> None:
        self._new.append(hold)
        self._held[hold.names[-1]] = hold, self._clock() + hold.seconds
        self._held.move_to_end(hold.names[-1])
        if len(self._held) > _REMEMBERED:
            self._held.popitem(last=False)

    def waits(self, row: int) -> bool:
        """Whether a row has marks whose prefixes are not computed yet."""
        return row in self._marked

    def take(self) -> tuple[BlockHold, ...]:
        """Return the holds that are new since the last call."""
        holds, self._new = tuple(self._new), []
        return holds

    def release(self, row: int) -> None:
        """Forget a row."""
        self._marked.pop(row, None)


class HeldBlocks:
    """The worker's half: names that a store of `blocks` blocks shall not evict.

    share, per_key: see `KVConnector.limit_holds`. release: called with names that may be held no
    more. clock: seconds.
    """

    def __init__(
        self,
        blocks: int,
        share: float,
        per_key: float,
        release: Callable[[Sequence[bytes]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limit = int(blocks * share)
        self._most = int(limit * per_key)
        self._clock = clock

        def released(held: tuple[tuple[Hashable, ...], ...]) -> None:
            release([name for name in held[0] if isinstance(name, bytes) and name not in self])

        self._holdings = Holdings([limit], [self._most], released)

    def __contains__(self, name: Any) -> bool:
        return self._holdings.holds(0, name)

    def hold(self, hold: BlockHold) -> tuple[bytes, ...]:
        """Hold a prefix, as far as it fits into its key's share; return the names held now.

        The key's least recently used prefixes make room for it.
        """
        now = self._clock()
        self._holdings.expire(now)
        names = hold.names[: self._most]
        if not names:
            return ()
        until = now + hold.seconds
        holding = Holding(hold.tenant, hold.key, len(names), (names,), hold.seconds, until)
        self._holdings.put(names[-1], holding)
        return tuple(name for name in names if name in self)

    def expire(self) -> None:
        """Release what has not been used for its time."""
        self._holdings.expire(self._clock())
