"""Which blocks are held for whom, within limits."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from attrs import define, field

__all__ = ["Holding", "Holdings"]

_NULL = 0


@define(eq=False)
class Holding:
    """A held prefix: its blocks in each cache group, and the monotonic time when it is released.

    blocks: ids on a device, or names in a store. seconds: that it is held after each use.
    """

    tenant: str
    key: str
    tokens: int
    blocks: tuple[tuple[Hashable, ...], ...]
    seconds: float
    until: float

    @property
    def scopes(self) -> tuple[tuple[str, ...], ...]:
        """What limits it: all holdings, its tenant, its key."""
        return (), (self.tenant,), (self.tenant, self.key)


@define(eq=False)
class _Scope:
    """Distinct blocks held within a scope, and how many holdings have each."""

    counts: list[int]
    holders: Counter[tuple[int, Hashable]] = field(factory=Counter)

    def add(self, blocks: Sequence[Sequence[Hashable]]) -> None:
        for block in _pairs(blocks):
            self.counts[block[0]] += not self.holders[block]
            self.holders[block] += 1

    def remove(self, blocks: Sequence[Sequence[Hashable]]) -> None:
        for block in _pairs(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                self.counts[block[0]] -= 1

    def exceeds(self, limits: Sequence[int]) -> bool:
        return any(count > limit for count, limit in zip(self.counts, limits, strict=True))


def _pairs(blocks: Sequence[Sequence[Hashable]]) -> Iterator[tuple[int, Hashable]]:
    return (
        (group, block)
        for group, ids in enumerate(blocks)
        for block in ids
        if block != _NULL
    )  # fmt: skip


class Holdings:
    """Holdings by the name of their last block, least recently used first.

    limits, key_limits: blocks of each group that all holdings, and those of one key, may have. A
    block counts once. release: called with the blocks of what is no longer held. Beyond a key's
    limit its least recently used holdings go; beyond the limit of all, those of the tenant with the
    most blocks.
    """

    def __init__(
        self,
        limits: Sequence[int],
        key_limits: Sequence[int],
        release: Callable[[Any], None],
    ) -> None:
        self._limits, self._key_limits, self._release = limits, key_limits, release
        self._holdings: OrderedDict[bytes, Holding] = OrderedDict()
        self._scopes: dict[tuple[str, ...], _Scope] = {}

    def __len__(self) -> int:
        return len(self._holdings)

    def __contains__(self, name: object) -> bool:
        return name in self._holdings

    def holds(self, group: int, block: Hashable) -> bool:
        """Whether a block of a cache group is held."""
        return (group, block) in self._scope(()).holders

    def put(self, name: bytes, holding: Holding) -> None:
        """Add a holding, whose blocks the caller has pinned; replaces one of the same name."""
        if name in self._holdings:
            self._drop(name)
        self._holdings[name] = holding
        for key in holding.scopes:
            scope = self._scopes.setdefault(key, _Scope([0] * len(self._limits)))
            scope.add(holding.blocks)
        while self._scope((holding.tenant, holding.key)).exceeds(self._key_limits):
            self._drop(self._oldest((holding.tenant, holding.key)))
        while self._scope(()).exceeds(self._limits):
            self._drop(self._oldest(self._largest_tenant()))

    def use(self, name: bytes, now: float) -> None:
        """Hold for as long again as was asked for."""
        holding = self._holdings.get(name)
        if holding is not None:
            holding.until = max(holding.until, now + holding.seconds)
            self._holdings.move_to_end(name)

    def tokens(self, name: bytes) -> int:
        """Return the tokens held under this name; 0 if there are none."""
        holding = self._holdings.get(name)
        return 0 if holding is None else holding.tokens

    def expire(self, now: float) -> None:
        """Release what has not been used for its time."""
        for name in [name for name, holding in self._holdings.items() if holding.until <= now]:
            self._drop(name)

    def clear(self) -> None:
        """Release everything."""
        for name in list(self._holdings):
            self._drop(name)

    def _scope(self, key: tuple[str, ...]) -> _Scope:
        return self._scopes.get(key) or _Scope([0] * len(self._limits))

    def _oldest(self, scope: tuple[str, ...]) -> bytes:
        return next(n for n, holding in self._holdings.items() if scope in holding.scopes)

    def _largest_tenant(self) -> tuple[str, ...]:
        tenants = (key for key in self._scopes if len(key) == 1)
        return max(tenants, key=lambda key: sum(self._scopes[key].counts))

    def _drop(self, name: bytes) -> None:
        holding = self._holdings.pop(name)
        for key in holding.scopes:
            scope = self._scopes[key]
            scope.remove(holding.blocks)
            if not scope.holders:
                del self._scopes[key]
        self._release(holding.blocks)
