"""Prefix reuse: names the full blocks of running rows and finds them for waiting requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from modulm.engine.kv_cache.manager import Hit, KVCacheManager
from modulm.engine.kv_cache.prefix_index import Chain, hasher
from modulm.engine.scheduling.request_queue import Entry
from modulm.engine.scheduling.row_table import RowTable

__all__ = ["PrefixReuse"]


class PrefixReuse:
    """Prefix reuse over all cache groups. If `enabled` is False, only the choices of one request
    (`n`) share its prompt; front ends give them a salt of their own.

    A block is named once its last token has been computed. Blocks that running rows are about to
    fill are recorded in `_filling`; a request that needs one waits for it instead of computing it
    again. So n choices of one prompt, or a burst of requests with a common beginning, compute it
    once.
    """

    def __init__(
        self, cache: KVCacheManager, table: RowTable, algorithm: str, enabled: bool
    ) -> None:
        self.enabled, self._reusable = enabled and cache.reusable, cache.reusable
        self.queried = self.hits = 0
        self._cache = cache
        self._table = table
        self._name, self._root = hasher(algorithm), b""
        self._named = tuple((size, np.zeros(table.rows, dtype=np.int64)) for size in cache.sizes)
        self._chains: dict[int, tuple[Chain, ...]] = {}
        self._filling: dict[bytes, int] = {}

    @property
    def expected(self) -> int:
        """Number of named blocks that running rows are about to fill."""
        return len(self._filling)

    def lookup(self, entry: Entry) -> Hit | None:
        """Find the entry's cached prefix; None: wait, a running row is computing more of it."""
        request: Any = entry.request
        several = request.reads_prefix and max(request.params.n, request.params.best_of or 1) > 1
        if not (self.enabled or (self._reusable and several)):
            return self._cache.lookup({}, 0)
        if not entry.chains or entry.chains[0].root != self._root:
            name, root = self._name, self._root
            entry.chains = tuple(Chain(request, size, name, root) for size, _ in self._named)
        tokens = entry.history.astype(np.int32)
        for chain in entry.chains:
            chain.extend(tokens)
        if not request.reads_prefix:
            return self._cache.lookup({}, 0)
        names = {chain.size: chain.names for chain in entry.chains}
        hit = self._cache.lookup(names, entry.tokens - 1)
        return None if self._coming(entry, hit) else hit

    def _coming(self, entry: Entry, hit: Hit) -> bool:
        chain = entry.chains[0]
        following, last = hit.tokens // chain.size, (entry.tokens - 1) // chain.size
        return following < last and chain.names[following] in self._filling

    def admit(self, entry: Entry, row: int, hit: Hit) -> None:
        """Record that the entry was admitted with the prefix `hit`."""
        if not entry.chains:
            return
        self.queried += entry.tokens if entry.request.reads_prefix else 0
        self.hits += hit.tokens
        self._chains[row] = entry.chains
        for size, named in self._named:
            named[row] = hit.tokens - hit.tokens % size
        chain = entry.chains[0]
        for name in chain.names[hit.tokens // chain.size :]:
            self._filling.setdefault(name, row)

    def advance(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Name the blocks that are full now that the rows' first `ends` tokens are computed."""
        if not self._chains:
            return
        for index, (size, named) in enumerate(self._named):
            before = named[rows]
            full = (ends - before >= size).nonzero()[0]
            if len(full):
                firsts, lasts = before[full] // size, ends[full] // size
                named[rows[full]] = lasts * size
                for row, first, last in zip(
                    rows[full].tolist(), firsts.tolist(), lasts.tolist(), strict=True
                ):
                    if row in self._chains:
                        self._name_blocks(index, row, first, last)
        self._cache.passed(rows, ends)

    def _name_blocks(self, index: int, row: int, first: int, last: int) -> None:
        chain = self._chains[row][index]
        if last > len(chain.names):
            chain.extend(self._table.tokens[row, : last * chain.size])
        names = chain.names[first:last]
        self._cache.register(row, chain.size, names, first)
        if index == 0 and self._filling:
            self._filled(row, names)

    def names(self, row: int) -> list[bytes]:
        """Return the names of the row's full blocks, for the smallest block size."""
        return self._chains[row][0].names

    def release(self, row: int) -> None:
        """Forget a row that is about to be released."""
        chains = self._chains.pop(row, None)
        if chains:
            size, named = self._named[0]
            self._filled(row, chains[0].names[int(named[row]) // size :])

    def forget(self, root: bytes | None = None) -> None:
        """Empty the prefix cache. root: see `Chain`; applies to blocks named from now on.

        Blocks that running rows are still filling depend on both roots and are never reused.
        """
        self._cache.forget()
        if root is None:
            return
        self._root = root
        self._filling.clear()
        for row, chains in self._chains.items():
            for chain, (size, named) in zip(chains, self._named, strict=True):
                del chain.names[int(named[row]) // size :]
                chain.root += root + b"+"

    def take_counts(self) -> tuple[int, int]:
        """Return the tokens looked up and found since the last call."""
        counts, self.queried, self.hits = (self.queried, self.hits), 0, 0
        return counts

    def _filled(self, row: int, names: list[bytes]) -> None:
        for name in names:
            if self._filling.get(name) == row:
                del self._filling[name]
