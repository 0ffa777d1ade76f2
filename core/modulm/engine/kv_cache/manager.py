"""KV cache manager: the block tables of all rows, for each cache group.

Layers with full attention keep all blocks of a row. Layers with a sliding window release blocks
that left the window. Recurrent layers keep one slot for the current state and, if prefixes are
reused, some for earlier lengths. Each group has its own pool. `KVCacheManager` allocates for all
groups or for none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from modulm.contracts.executor import Capacity, GroupCapacity
from modulm.contracts.state import SEGMENT
from modulm.engine.kv_cache.block_pool import NULL, BlockPool
from modulm.engine.kv_cache.prefix_index import PrefixIndex
from modulm.errors import EngineError, RequestError

__all__ = ["BlockTables", "Hit", "KVCacheManager"]

_BOUNDLESS = 1 << 60


class Hit(NamedTuple):
    """A cached prefix: its length in tokens and each group's blocks (null where not needed)."""

    tokens: int
    blocks: tuple[list[int], ...]


class BlockTables(ABC):
    """The block tables and the pool of one cache group.

    tables: [rows, blocks] int32, 0 for no block. block_counts: [rows], entries in use. room:
    [rows], tokens that they hold.
    """

    def __init__(self, size: int, blocks: int, rows: int, max_len: int) -> None:
        self.size = size
        self.index = PrefixIndex()
        self.pool = BlockPool(blocks, self.index.forget)
        self.tables = np.zeros((rows, -(-max_len // size)), dtype=np.int32)
        self.block_counts = np.zeros(rows, dtype=np.int64)
        self.room = np.zeros(rows, dtype=np.int64)

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks from being reused, even after their rows have been released."""
        self.pool.share(blocks)

    def unpin(self, blocks: Sequence[int], *, first: bool = False) -> None:
        """Undo one `pin` of each block. first: see `BlockGroup.unpin`."""
        self.pool.release(blocks, first=first)

    def shorten(self, row: int, tokens: int) -> None:
        """Release the row's blocks behind its first `tokens` tokens, a multiple of their size."""
        first, count = tokens // self.size, int(self.block_counts[row])
        self.pool.release(self.tables[row, first:count].tolist())
        self.tables[row, first:count] = NULL
        self.block_counts[row], self.room[row] = first, tokens

    def watch(self, watcher: Callable[[bytes, bool], None]) -> None:
        """Report blocks that enter and leave the prefix cache; see `BlockGroup.watch`."""
        self.index.watchers.append(watcher)

    @abstractmethod
    def most(self, chunk: int) -> int:
        """Return the maximum length of a row that is alone. chunk: maximum tokens per step."""

    @abstractmethod
    def claim(self, length: int, end: int) -> int:
        """Return the tokens that need blocks on admission of a row of `length` tokens.

        end: where the row's first step ends.
        """

    @abstractmethod
    def match(self, names: Sequence[bytes]) -> int:
        """Return how many leading blocks need not be computed."""

    @abstractmethod
    def blocks_for(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks to adopt for `names`, as many as `match` returned."""

    def lack(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray | None:
        """Return the blocks missing for rows of `ends` tokens: [rows]; None if none are missing."""
        room = self.room[rows]
        if not np.count_nonzero(ends > room):
            return None
        lack: np.ndarray = np.maximum(-((room - ends) // self.size), 0)
        return lack

    def price(self, lack: np.ndarray) -> int:
        """Return how many blocks must be free for `extend`."""
        return int(lack.sum())

    def extend(self, rows: np.ndarray, lack: np.ndarray) -> None:
        """Append `lack` new blocks to the rows' tables."""
        short = lack.nonzero()[0]
        rows, lack = rows[short], lack[short]
        total = int(lack.sum())
        ramp = np.arange(total) - np.repeat(np.cumsum(lack) - lack, lack)
        columns = np.repeat(self.block_counts[rows], lack) + ramp
        self.tables[np.repeat(rows, lack), columns] = self.pool.take(total)
        self.block_counts[rows] += lack
        self.room[rows] += lack * self.size

    def adopt(self, row: int, blocks: Sequence[int]) -> None:
        """Start an empty row with existing blocks."""
        self.pool.share(blocks)
        self.tables[row, : len(blocks)] = blocks
        self.block_counts[row] = len(blocks)
        self.room[row] = len(blocks) * self.size

    def register(self, row: int, names: Sequence[bytes], first: int) -> None:
        """Add the row's full blocks from index `first` to the prefix index under `names`."""
        blocks = self.tables[row, first : first + len(names)].tolist()
        for name, block in zip(names, blocks, strict=True):
            if block != NULL and self.index.add(name, block):
                self.pool.mark(block)

    def trim(self, rows: np.ndarray, committed: np.ndarray) -> bool:
        """Release blocks that no later token sees; return whether there were any."""
        return False

    def passed(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Called after a step took the rows to `ends` tokens and its blocks were registered."""

    def release(self, row: int) -> None:
        """Release all blocks of a row."""
        self.shorten(row, 0)


class _Full(BlockTables):
    """Full attention: a prefix can be reused up to its first missing block."""

    def most(self, chunk: int) -> int:
        return (self.pool.blocks - 1) * self.size

    def claim(self, length: int, end: int) -> int:
        return length

    def match(self, names: Sequence[bytes]) -> int:
        return len(self.index.leading(names))

    def blocks_for(self, names: Sequence[bytes]) -> list[int]:
        return self.index.leading(names)


class _Window(BlockTables):
    """A sliding window: a token sees itself and the `window - 1` tokens before it."""

    def __init__(self, size: int, blocks: int, rows: int, max_len: int, window: int) -> None:
        super().__init__(size, blocks, rows, max_len)
        self.window = window
        self._seen = max(1, -(-(window - 1) // size))
        self._dropped = np.zeros(rows, dtype=np.int64)

    def most(self, chunk: int) -> int:
        # A window and a chunk may both straddle blocks, and trimming lags a step behind.
        enough = -(-(self.window + 2 * chunk) // self.size) + 2
        return _BOUNDLESS if self.pool.blocks - 1 >= enough else (self.pool.blocks - 1) * self.size

    def claim(self, length: int, end: int) -> int:
        return end

    def match(self, names: Sequence[bytes]) -> int:
        return self.index.trailing(names, self._seen)

    def blocks_for(self, names: Sequence[bytes]) -> list[int]:
        unseen = max(0, len(names) - self._seen)
        return [NULL] * unseen + [self.index.block(name) for name in names[unseen:]]

    def adopt(self, row: int, blocks: Sequence[int]) -> None:
        super().adopt(row, blocks)
        self._dropped[row] = blocks.count(NULL)

    def trim(self, rows: np.ndarray, committed: np.ndarray) -> bool:
        live = (committed - self.window + 1) // self.size
        stale = (live > self._dropped[rows]).nonzero()[0]
        for row, end in zip(rows[stale].tolist(), live[stale].tolist(), strict=True):
            entries = self.tables[row, self._dropped[row] : end]
            self.pool.release(entries.tolist())
            entries[:] = NULL
            self._dropped[row] = end
        return bool(len(stale))

    def release(self, row: int) -> None:
        super().release(row)
        self._dropped[row] = 0


class _State(_Window):
    """Recurrent states: a block of `size` tokens is the slot of the state after its last token.

    The slot of a full block is not written again, so other rows may reuse it if only whole segments
    led to it: a step that ended within a segment rounds differently. Slots for lengths within a
    step are optional; they are allocated while half of the pool is free. Without prefix reuse, a
    row needs a single block of the maximum length. A row with drafts borrows a slot for the state
    after each of its tokens except the last, see `Plan.state_slots`.
    """

    def __init__(self, size: int, blocks: int, rows: int, max_len: int) -> None:
        super().__init__(size, blocks, rows, max_len, window=2)
        self.kept = size < max_len
        self._whole = np.ones(rows, dtype=bool)
        self._lent: dict[int, tuple[int, list[int]]] = {}

    def most(self, chunk: int) -> int:
        # One to read, one to write, and one whose release lags a step behind.
        return _BOUNDLESS if self.pool.blocks - 1 >= (3 if self.kept else 1) else 0

    def price(self, lack: np.ndarray) -> int:
        return int(np.count_nonzero(lack))

    def extend(self, rows: np.ndarray, lack: np.ndarray) -> None:
        short = lack.nonzero()[0]
        rows, lack = rows[short], lack[short]
        firsts = self.block_counts[rows]
        self.block_counts[rows] += lack
        self.room[rows] += lack * self.size
        lasts = self.block_counts[rows] - 1
        self.tables[rows, lasts] = self.pool.take(len(rows))
        for row, first, last in zip(rows.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            for column in range(first, last):
                if self._whole[row] and self.pool.free > self.pool.blocks // 2:
                    self.tables[row, column] = self.pool.take(1)[0]

    def adopt(self, row: int, blocks: Sequence[int]) -> None:
        super().adopt(row, blocks)
        self._whole[row] = True

    def register(self, row: int, names: Sequence[bytes], first: int) -> None:
        if self._whole[row]:
            super().register(row, names, first)

    def passed(self, rows: np.ndarray, ends: np.ndarray) -> None:
        self._whole[rows] &= ends % SEGMENT == 0

    def lend(self, rows: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Lend slots for states after the rows' `starts` tokens: [rows, most drafts] int32."""
        slots = np.zeros((len(rows), int(counts.max())), dtype=np.int32)
        for index in counts.nonzero()[0].tolist():
            row, count = int(rows[index]), int(counts[index])
            lent = self.pool.take(count)
            self._lent[row] = (int(starts[index]), lent)
            self._whole[row] = False
            slots[index, :count] = lent
        return slots

    def settle(self, row: int, end: int) -> bool:
        """Keep the lent slot of the state at `end` tokens and return the others to the pool.

        Returns whether the row had any.
        """
        if row not in self._lent:
            return False
        start, slots = self._lent.pop(row)
        step, column = end - start - 1, (end - 1) // self.size
        if step < len(slots):
            own = int(self.tables[row, column])
            self.tables[row, column], slots[step] = slots[step], own
        self.pool.release(slots)
        return True

    def release(self, row: int) -> None:
        self.pool.release(self._lent.pop(row, (0, []))[1])
        super().release(row)


class _Cross(BlockTables):
    """Keys and values of the row's encoder outputs, complete from its first step on; not reused.

    lengths: [rows], slots for encoder outputs.
    """

    def __init__(self, size: int, blocks: int, rows: int, longest: int) -> None:
        super().__init__(size, blocks, rows, longest)
        self.longest = longest
        self.lengths = np.zeros(rows, dtype=np.int64)

    def room_for(self, runs: Sequence[int]) -> int:
        """Return the slots needed for runs of these lengths; each run starts a new block."""
        last = sum(-(-length // self.size) * self.size for length in runs[:-1])
        return last + sum(runs[-1:])

    def most(self, chunk: int) -> int:
        return _BOUNDLESS if (self.pool.blocks - 1) * self.size >= self.longest else 0

    def claim(self, length: int, end: int) -> int:
        return end

    def match(self, names: Sequence[bytes]) -> int:
        return 0

    def blocks_for(self, names: Sequence[bytes]) -> list[int]:
        return []

    def lack(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray | None:
        lack: np.ndarray = -(-self.lengths[rows] // self.size) - self.block_counts[rows]
        return lack if lack.any() else None

    def release(self, row: int) -> None:
        super().release(row)
        self.lengths[row] = 0


def _build(group: GroupCapacity, rows: int, max_len: int) -> BlockTables:
    kind, size, window, blocks = group.kind, group.block_size, group.window, group.blocks
    if kind == "state":
        return _State(size, blocks, rows, max_len)
    if kind == "cross":
        return _Cross(size, blocks, rows, window or 0)
    if kind != "attention":
        raise EngineError(f"cache groups of kind {kind!r} are unknown")
    if window is None:
        return _Full(size, blocks, rows, max_len)
    return _Window(size, blocks, rows, max_len, window)


class KVCacheManager:
    """All cache groups of a model; models without caches have none."""

    def __init__(self, capacity: Capacity, rows: int) -> None:
        max_len = capacity.max_model_len
        self.groups = tuple(_build(group, rows, max_len) for group in capacity.groups)
        self._states = [group for group in self.groups if isinstance(group, _State)]
        self._cross = [group for group in self.groups if isinstance(group, _Cross)]
        #: Maximum number of encoder outputs for cross attention; 0 without such layers.
        self.crossed = min((group.longest for group in self._cross), default=0)
        unnamed = [*self._cross, *(group for group in self._states if not group.kept)]
        #: Distinct block sizes: a row needs one chain of names for each.
        self.sizes = tuple(sorted({group.size for group in self.groups if group not in unnamed}))
        #: Whether prefixes can be reused at all.
        self.reusable = bool(self.groups) and not unnamed
        #: Prompts are split at multiples of this, so that results do not depend on the split.
        self.unit = SEGMENT if self._states else 1
        #: Whether all groups store tokens in blocks of one size.
        self.uniform = len(self.sizes) == 1 and not (self._states or self._cross)
        self._changes = 0
        self._gathered: tuple[np.ndarray, int, tuple[np.ndarray, ...]] | None = None

    def check_crossed(self, lengths: Sequence[int]) -> None:
        """Raise RequestError if encoder outputs do not fit. lengths: number of outputs per run."""
        needed = max((group.room_for(lengths) for group in self._cross), default=sum(lengths))
        if needed > self.crossed:
            message = f"an encoder's input of {sum(lengths)} tokens: at most {self.crossed}"
            raise RequestError(message, "prompt")

    @property
    def usage(self) -> float:
        """Fraction of all blocks in use, 0 to 1."""
        total = sum(group.pool.blocks - 1 for group in self.groups)
        return sum(group.pool.used for group in self.groups) / total if total else 0.0

    def most(self, chunk: int) -> int:
        """Return the maximum length of a row that is alone."""
        return min((group.most(chunk) for group in self.groups), default=_BOUNDLESS)

    def lookup(self, names: Mapping[int, Sequence[bytes]], most: int) -> Hit:
        """Find the longest cached prefix of at most `most` tokens. names: block size -> names.

        A block missing in one group shortens the prefix for all, and a shorter prefix needs other
        blocks of a window, so the groups are queried in turn until all agree. The length is then a
        multiple of every block size.
        """
        tokens, agreed = most, -1
        while tokens != agreed:
            agreed = tokens
            for group in self.groups:
                if tokens:
                    tokens = group.match(names[group.size][: tokens // group.size]) * group.size
        if not tokens:
            return Hit(0, tuple([] for _ in self.groups))
        return Hit(
            tokens, tuple(g.blocks_for(names[g.size][: tokens // g.size]) for g in self.groups)
        )

    def admit(
        self, row: int, hit: Hit, known: int, end: int, spare: float, encoded: Sequence[int] = ()
    ) -> bool:
        """Allocate blocks for a new row of `known` tokens whose first step ends at `end`.

        encoded: encoder outputs for cross attention, per run. Returns False, without change, if
        less than the fraction `spare` of a pool would stay free.
        """
        self._changes += 1
        one = np.array([row])
        for cross in self._cross:
            cross.lengths[row] = cross.room_for(encoded)
        for group, blocks in zip(self.groups, hit.blocks, strict=True):
            group.adopt(row, blocks)
        lacks = [g.lack(one, np.array([g.claim(known, end)])) for g in self.groups]
        for group, lack in zip(self.groups, lacks, strict=True):
            price = 0 if lack is None else group.price(lack)
            if price + int(spare * group.pool.blocks) > group.pool.free:
                self.release(row)
                return False
        self._extend(one, lacks)
        return True

    def grow(self, rows: np.ndarray, ends: np.ndarray) -> bool:
        """Allocate blocks for rows up to `ends` tokens. False, without change: too few are free."""
        lacks = [group.lack(rows, ends) for group in self.groups]
        for group, lack in zip(self.groups, lacks, strict=True):
            if lack is not None and group.price(lack) > group.pool.free:
                return False
        self._extend(rows, lacks)
        return True

    def reserve(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Allocate blocks for tokens up to `ends`, as many as are free."""
        for group in self.groups:
            lack = None if isinstance(group, _State) else group.lack(rows, ends)
            if lack is not None and group.price(lack) <= group.pool.free:
                self._changes += 1
                group.extend(rows, lack)

    def room(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens that each row has blocks for: [rows]."""
        room = np.full(len(rows), _BOUNDLESS)
        for group in self.groups:
            if isinstance(group, _Cross):
                continue
            np.minimum(room, group.room[rows], out=room)
        return room

    def lend(
        self, rows: np.ndarray, drafted: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray | None, ...]]:
        """Lend slots for the recurrent states after each drafted token.

        Returns how many drafts of each row got a slot in every group, and `Plan.state_slots`.
        """
        for group in self._states:
            before = np.cumsum(drafted) - drafted
            drafted = np.clip(group.pool.free - before, 0, drafted)
        return drafted, tuple(
            group.lend(rows, drafted, starts) if isinstance(group, _State) else None
            for group in self.groups
        )

    def settle(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Return lent slots of states, except that of each row's `ends` tokens."""
        for group in self._states:
            for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
                self._changes += group.settle(row, end)

    def _extend(self, rows: np.ndarray, lacks: Sequence[np.ndarray | None]) -> None:
        for group, lack in zip(self.groups, lacks, strict=True):
            if lack is not None:
                self._changes += 1
                group.extend(rows, lack)

    def register(self, row: int, size: int, names: Sequence[bytes], first: int) -> None:
        """Add the row's full blocks from index `first` to the prefix index under `names`."""
        for group in self.groups:
            if group.size == size:
                group.register(row, names, first)

    def passed(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Called after a step took the rows to `ends` tokens and its blocks were registered."""
        for group in self.groups:
            group.passed(rows, ends)

    def trim(self, rows: np.ndarray, committed: np.ndarray) -> None:
        """Release blocks that left the rows' windows. committed: computed tokens per row."""
        for group in self.groups:
            self._changes += group.trim(rows, committed)

    def release(self, row: int) -> None:
        """Release all blocks of a row."""
        self._changes += 1
        for group in self.groups:
            group.release(row)

    def forget(self) -> None:
        """Empty the prefix cache; rows keep their blocks."""
        for group in self.groups:
            group.index.clear()
            group.pool.unmark()

    def tables(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the rows' block table of each group, [rows, most blocks] int32. Do not modify."""
        cached = self._gathered
        if cached is not None and cached[0] is rows and cached[1] == self._changes:
            return cached[2]
        tables = tuple(
            group.tables[:, : int(group.block_counts[rows].max(initial=0))].take(rows, axis=0)
            for group in self.groups
        )
        self._gathered = (rows, self._changes, tables)
        return tables
