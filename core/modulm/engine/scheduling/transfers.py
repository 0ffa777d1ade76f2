"""KV transfers: blocks that a connector loads and saves beside the steps.

A request whose beginning another place holds gets a row and blocks, and waits in it until they
are filled; what could not be loaded is computed. Full blocks are saved. The blocks of a transfer
stay as they are until it has ended, whatever becomes of the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from modulm.contracts.connector import BlockTransfer, KVIndex, TransferPlan, TransferResult
from modulm.contracts.executor import Plan
from modulm.engine.kv_cache.block_pool import NULL
from modulm.engine.kv_cache.manager import Hit, KVCacheManager
from modulm.engine.scheduling.prefix_reuse import PrefixReuse
from modulm.engine.scheduling.request_queue import Entry
from modulm.engine.scheduling.row_table import RowTable
from modulm.errors import ConfigError

__all__ = ["KVTransfers"]


@frozen(eq=False)
class _Load:
    """A row waits for the blocks of its first `tokens` tokens, of which it had `held`."""

    transfer: BlockTransfer
    row: int
    epoch: int
    held: int
    tokens: int


class KVTransfers:
    """Loads and saves under way. Without an index there are none.

    loaded: row -> tokens that need no work, of rows whose load ended and which have not run yet.
    """

    def __init__(
        self, index: KVIndex | None, cache: KVCacheManager, table: RowTable, reuse: PrefixReuse
    ) -> None:
        self.index = index
        self.loaded: dict[int, int] = {}
        self.loading: set[int] = set()
        self._cache = cache
        self._table = table
        self._reuse = reuse
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, BlockTransfer] = {}
        self._new: tuple[list[BlockTransfer], list[BlockTransfer]] = ([], [])
        self._saved: dict[int, int] = {}
        self._held: dict[str, int] = {}
        self._saving: set[bytes] = set()
        self._count = 0
        self._asked = False
        if index is not None and not (reuse.enabled and cache.uniform):
            raise ConfigError(
                "kv_transfer_config",
                "a KV connector needs prefix caching, and a model all of whose layers keep blocks "
                "of one size and no states",
            )

    @property
    def busy(self) -> bool:
        """Whether transfers are under way."""
        return bool(self._loads or self._saves)

    def matched(self, entry: Entry, hit: Hit) -> int | None:
        """Tokens of the entry that need not be computed, `hit` included; None: ask again later."""
        if self.index is None or not entry.request.reads_prefix:
            return hit.tokens
        size = self._cache.sizes[0]
        names = entry.chains[0].names[: (entry.tokens - 1) // size]
        found = self.index.matched(entry.request.id, names, hit.tokens // size)
        if found is None:
            self._asked = True
            return None
        self._held[entry.request.id] = found
        return max(hit.tokens, min(found, len(names)) * size)

    def admit(self, entry: Entry, row: int) -> None:
        """The entry got a row: what the other place holds of it is not saved again."""
        if self.index is not None:
            self._saved[row] = self._held.get(entry.request.id, 0)

    def load(self, entry: Entry, row: int, hit: Hit, tokens: int) -> None:
        """Fill the row's blocks up to `tokens`; `hit`: what it begins with."""
        size = self._cache.sizes[0]
        first, last = hit.tokens // size, tokens // size
        names = tuple(entry.chains[0].names[first:last])
        transfer = self._transfer(entry.request.id, row, names, range(first, last))
        self._loads[transfer.id] = _Load(
            transfer, row, int(self._table.epoch[row]), hit.tokens, tokens
        )
        self._new[0].append(transfer)
        self.loading.add(row)
        self._table.waiting[row] = True

    def save(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """The rows' first `ends` tokens are computed: save the blocks that are wanted."""
        if self.index is None:
            return
        size = self._cache.sizes[0]
        for row, full in zip(rows.tolist(), (ends // size).tolist(), strict=True):
            done = self._saved.get(row, 0)
            if full <= done:
                continue
            request = str(self._table.names[row])
            names = self._reuse.names(row)[:full]
            wanted = self.index.wants(request, names)
            self._saved[row] = full if wanted >= full else done
            self._save(request, row, names, range(done, min(wanted, full)))

    def _save(self, request: str, row: int, names: Sequence[bytes], places: range) -> None:
        tables = [group.tables[row] for group in self._cache.groups]
        kept = [
            place
            for place in places
            if names[place] not in self._saving and all(t[place] != NULL for t in tables)
        ]
        if kept:
            chosen = tuple(names[place] for place in kept)
            transfer = self._transfer(request, row, chosen, kept)
            self._saving.update(chosen)
            self._saves[transfer.id] = transfer
            self._new[1].append(transfer)

    def _transfer(
        self, request: str, row: int, names: tuple[bytes, ...], places: Sequence[int]
    ) -> BlockTransfer:
        """A transfer of the row's blocks at `places`, which are held until it has ended."""
        self._count += 1
        blocks = tuple(
            tuple(group.tables[row, list(places)].tolist()) for group in self._cache.groups
        )
        for group, ids in zip(self._cache.groups, blocks, strict=True):
            group.pool.share(ids)
        return BlockTransfer(self._count, request, names, blocks)

    def plan(self, rows: int) -> TransferPlan | None:
        """What to begin in a step of `rows` rows. One of none is empty where someone waits."""
        loads, saves = self._new
        asked, self._asked = self._asked, False
        if not loads and not saves and (rows or not (self.busy or asked)):
            return None
        self._new = ([], [])
        return TransferPlan(tuple(loads), tuple(saves))

    def end(self, result: TransferResult) -> None:
        """Transfers have ended."""
        for identity in result.done:
            self._end(identity, worked=True)
        for identity, _ in result.failed:
            self._end(identity, worked=False)

    def fail(self, plan: Plan) -> None:
        """The step raised: what it was to begin has failed."""
        if plan.transfers is not None:
            for transfer in (*plan.transfers.loads, *plan.transfers.saves):
                self._end(transfer.id, worked=False)

    def _end(self, identity: int, *, worked: bool) -> None:
        save = self._saves.pop(identity, None)
        if save is not None:
            self._saving.difference_update(save.names)
            self._free(save)
            if worked and self.index is not None:
                self.index.stored(save.names)
            return
        load = self._loads.pop(identity, None)
        if load is None:
            return
        if self._table.epoch[load.row] == load.epoch:
            self._arrived(load, worked=worked)
        self._free(load.transfer)

    def _arrived(self, load: _Load, *, worked: bool) -> None:
        row, tokens = load.row, load.tokens if worked else load.held
        self.loading.discard(row)
        self.loaded[row] = tokens
        self._table.waiting[row] = False
        self._table.computed[row] = tokens
        if worked:
            self._reuse.advance(np.array([row]), np.array([tokens]))
        else:
            self._saved[row] = 0  # what failed to load may be gone

    def _free(self, transfer: BlockTransfer) -> None:
        for group, blocks in zip(self._cache.groups, transfer.blocks, strict=True):
            group.pool.release(blocks)

    def release(self, row: int) -> bool:
        """The row is gone. Whether no plan has admitted it yet."""
        unseen = row in self.loading or row in self.loaded
        self.loading.discard(row)
        self.loaded.pop(row, None)
        self._saved.pop(row, None)
        return unseen

    def finished(self, request: str) -> None:
        """The request has ended."""
        if self.index is not None:
            self._held.pop(request, None)
            self.index.finished(request)
