"""Prefix reuse: names the full blocks of running rows and finds them for waiting requests."""

from __future__ import annotations

import numpy as np

from modulm.engine.kv_cache.manager import Hit, KVCacheManager
from modulm.engine.kv_cache.prefix_index import Chain, hasher
from modulm.engine.scheduling.request_queue import Entry
from modulm.engine.scheduling.row_table import RowTable

__all__ = ["PrefixReuse"]


class PrefixReuse:
    """Prefix reuse over all cache groups; does nothing if `enabled` is False.

    A block is named once its last token has been computed. Blocks that running rows are about to
    fill are recorded in `_filling`; a request that needs one waits for it instead of computing it
    again. So n choices of one prompt, or a burst of requests with a common beginning, compute it
    once.
    """

    def __init__(
        self, cache: KVCacheManager, table: RowTable, algorithm: str, enabled: bool
    ) -> None:
        self.enabled = enabled and cache.reusable
        self.queried = 0
        self.hits = 0
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
        if not self.enabled:
            return self._cache.lookup({}, 0)
        if not entry.chains or entry.chains[0].root != self._root:
            request, name, root = entry.request, self._name, self._root
            entry.chains = tuple(Chain(request, size, name, root) for size, _ in self._named)
        tokens = entry.history.astype(np.int32)
        for chain in entry.chains:
            chain.extend(tokens)
        if not entry.request.reads_prefix:
            return self._cache.lookup({}, 0)
        names = {chain.size: chain.names for chain in entry.chains}
        hit = self._cache.lookup(names, entry.tokens - 1)
        return None if self._coming(entry, hit) else hit

    def _coming(self, entry: Entry, hit: Hit) -> bool:
        chain = entry.chains[0]
        following = hit.tokens // chain.size
        inside = following < (entry.tokens - 1) // chain.size
        return inside and chain.names[following] in self._filling

    def admit(self, entry: Entry, row: int, hit: Hit) -> None:
        """Record that the entry was admitted with the prefix `hit`."""
        if not self.enabled:
            return
        if entry.request.reads_prefix:
            self.queried += entry.tokens
            self.hits += hit.tokens
        self._chains[row] = entry.chains
        for size, named in self._named:
            named[row] = hit.tokens - hit.tokens % size
        chain = entry.chains[0]
        for name in chain.names[hit.tokens // chain.size :]:
            self._filling.setdefault(name, row)

    def advance(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Name the blocks that are full now that the rows' first `ends` tokens are computed."""
        if not self.enabled:
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
        counts = (self.queried, self.hits)
        self.queried = self.hits = 0
        return counts

    def _filled(self, row: int, names: list[bytes]) -> None:
        for name in names:
            if self._filling.get(name) == row:
                del self._filling[name]
