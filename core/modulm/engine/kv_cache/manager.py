"""KV cache manager: the block tables of all rows, one per group of layers that keep the same.

Layers with full attention keep every block of a row, layers with a sliding window give back the
blocks that fell out of it, layers with a recurrent state keep one slot for the tokens so far and,
if prefixes are to be found again, some for earlier lengths. Each group has a pool of its own;
`KVCacheManager` makes them move together: a row gets what it needs in all groups or in none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
    """A cached prefix: how many tokens, and each group's blocks for it (null where unneeded)."""

    tokens: int
    blocks: tuple[list[int], ...]


class BlockTables(ABC):
    """The tables of one group over its pool.

    tables: [rows, blocks] int32, 0 where there is no block; held: [rows] entries in use; room:
    [rows] tokens that they hold.
    """

    def __init__(self, size: int, blocks: int, rows: int, max_len: int) -> None:
        self.size = size
        self.index = PrefixIndex()
        self.pool = BlockPool(blocks, self.index.forget)
        self.tables = np.zeros((rows, -(-max_len // size)), dtype=np.int32)
        self.held = np.zeros(rows, dtype=np.int64)
        self.room = np.zeros(rows, dtype=np.int64)

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep blocks as they are, whatever becomes of the rows that hold them."""
        self.pool.share(blocks)

    def drop(self, blocks: Sequence[int]) -> None:
        """Give up blocks that were held."""
        self.pool.release(blocks)

    @abstractmethod
    def most(self, chunk: int) -> int:
        """How long a row can become that has the pool to itself; `chunk`: most tokens a step."""

    @abstractmethod
    def claim(self, known: int, end: int) -> int:
        """Tokens that need blocks when a row of `known` tokens starts with a step up to `end`."""

    @abstractmethod
    def match(self, names: Sequence[bytes]) -> int:
        """How many of the leading blocks, by name, need not be computed."""

    @abstractmethod
    def found(self, names: Sequence[bytes]) -> list[int]:
        """The blocks to adopt for all of `names`, which `match` approved of."""

    def lack(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray | None:
        """[rows] blocks missing for rows that will be `ends` tokens long; None if none are."""
        room = self.room[rows]
        if not (ends > room).any():
            return None
        lack: np.ndarray = np.maximum(-((room - ends) // self.size), 0)
        return lack

    def price(self, lack: np.ndarray) -> int:
        """How many blocks must be free for `extend`."""
        return int(lack.sum())

    def extend(self, rows: np.ndarray, lack: np.ndarray) -> None:
        """Append `lack` fresh blocks to the rows' tables."""
        short = lack.nonzero()[0]
        rows, lack = rows[short], lack[short]
        total = int(lack.sum())
        ramp = np.arange(total) - np.repeat(np.cumsum(lack) - lack, lack)
        columns = np.repeat(self.held[rows], lack) + ramp
        self.tables[np.repeat(rows, lack), columns] = self.pool.take(total)
        self.held[rows] += lack
        self.room[rows] += lack * self.size

    def adopt(self, row: int, blocks: Sequence[int]) -> None:
        """The row, which is empty, begins with blocks that exist."""
        self.pool.share(blocks)
        self.tables[row, : len(blocks)] = blocks
        self.held[row] = len(blocks)
        self.room[row] = len(blocks) * self.size

    def register(self, row: int, names: Sequence[bytes], first: int) -> None:
        """Blocks first, first + 1, ... of the row are full and may be found by `names`."""
        blocks = self.tables[row, first : first + len(names)].tolist()
        for name, block in zip(names, blocks, strict=True):
            if block != NULL and self.index.add(name, block):
                self.pool.mark(block)

    def trim(self, rows: np.ndarray, committed: np.ndarray) -> bool:
        """Give back blocks that no later token can see. Whether there were any."""
        return False

    def passed(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """A step took the rows to `ends` tokens, and what it filled is registered."""

    def release(self, row: int) -> None:
        """Give back all blocks of a row."""
        held = int(self.held[row])
        self.pool.release(self.tables[row, :held].tolist())
        self.tables[row, :held] = NULL
        self.held[row] = self.room[row] = 0


class _Full(BlockTables):
    """Every token sees all before it: a prefix is usable as far as its blocks are unbroken."""

    def most(self, chunk: int) -> int:
        return (self.pool.blocks - 1) * self.size

    def claim(self, known: int, end: int) -> int:
        return known

    def match(self, names: Sequence[bytes]) -> int:
        return len(self.index.leading(names))

    def found(self, names: Sequence[bytes]) -> list[int]:
        return self.index.leading(names)


class _Window(BlockTables):
    """A token sees itself and the `window - 1` tokens before it."""

    def __init__(self, size: int, blocks: int, rows: int, max_len: int, window: int) -> None:
        super().__init__(size, blocks, rows, max_len)
        self.window = window
        self._seen = max(1, -(-(window - 1) // size))
        self._dropped = np.zeros(rows, dtype=np.int64)

    def most(self, chunk: int) -> int:
        # A window and a chunk may both straddle blocks, and trimming lags a step behind.
        enough = -(-(self.window + 2 * chunk) // self.size) + 2
        return _BOUNDLESS if self.pool.blocks - 1 >= enough else (self.pool.blocks - 1) * self.size

    def claim(self, known: int, end: int) -> int:
        return end

    def match(self, names: Sequence[bytes]) -> int:
        return self.index.trailing(names, self._seen)

    def found(self, names: Sequence[bytes]) -> list[int]:
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
    """A block of `size` tokens is the slot of the state that its last token so far leaves.

    The next token sees that state and nothing else. A full block's slot is never written again,
    so it may be found by other rows, as long as whole segments led to it: a step that ended within
    one has rounded differently than the next reader's would. Slots of lengths that a step passes
    are optional, and taken while half of the pool is free. A block of the longest length is all
    that a row needs where nothing is to be found again. A row with drafted tokens borrows a slot
    for the state that each of them but the last leaves: see `Plan.state_slots`.
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
        firsts = self.held[rows]
        self.held[rows] += lack
        self.room[rows] += lack * self.size
        lasts = self.held[rows] - 1
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
        """Slots for the states of rows on their way from `starts` tokens: [rows, most] int32."""
        slots = np.zeros((len(rows), int(counts.max())), dtype=np.int32)
        for place in counts.nonzero()[0].tolist():
            row, count = int(rows[place]), int(counts[place])
            lent = self.pool.take(count)
            self._lent[row] = (int(starts[place]), lent)
            self._whole[row] = False
            slots[place, :count] = lent
        return slots

    def settle(self, row: int, end: int) -> bool:
        """The row stands at `end` tokens: the slot of that state is its own, the others go back.

        Whether there were any.
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
    """The keys and values of what the row's encoder gave: all there from its first step on.

    lengths: [rows] slots for outputs of the encoder. No other row finds them.
    """

    def __init__(self, size: int, blocks: int, rows: int, longest: int) -> None:
        super().__init__(size, blocks, rows, longest)
        self.longest = longest
        self.lengths = np.zeros(rows, dtype=np.int64)

    def room_for(self, runs: Sequence[int]) -> int:
        """Slots for that many outputs in each run: the first has blocks up to its last, the others
        begin with a block.
        """
        last = sum(-(-length // self.size) * self.size for length in runs[:-1])
        return last + sum(runs[-1:])

    def most(self, chunk: int) -> int:
        return _BOUNDLESS if (self.pool.blocks - 1) * self.size >= self.longest else 0

    def claim(self, known: int, end: int) -> int:
        return end

    def match(self, names: Sequence[bytes]) -> int:
        return 0

    def found(self, names: Sequence[bytes]) -> list[int]:
        return []

    def lack(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray | None:
        lack: np.ndarray = -(-self.lengths[rows] // self.size) - self.held[rows]
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
        raise EngineError(f"cache groups of kind {kind!r} are not known")
    if window is None:
        return _Full(size, blocks, rows, max_len)
    return _Window(size, blocks, rows, max_len, window)


class KVCacheManager:
    """All groups of a model, moving together. A model that keeps nothing has none."""

    def __init__(self, capacity: Capacity, rows: int) -> None:
        max_len = capacity.max_model_len
        self.groups = tuple(_build(group, rows, max_len) for group in capacity.groups)
        self._states = [group for group in self.groups if isinstance(group, _State)]
        self._cross = [group for group in self.groups if isinstance(group, _Cross)]
        #: Most outputs of an encoder that layers of cross attention look at; 0 if there are none.
        self.crossed = min((group.longest for group in self._cross), default=0)
        lost = [*self._cross, *(group for group in self._states if not group.kept)]
        #: Distinct block sizes: a row needs one chain of names for each.
        self.sizes = tuple(sorted({group.size for group in self.groups if group not in lost}))
        #: Whether prefixes can be reused at all.
        self.reusable = bool(self.groups) and not lost
        #: Tokens at whose multiples a prompt is best cut, so that results do not depend on the cut.
        self.unit = SEGMENT if self._states else 1
        #: Whether all groups keep blocks of tokens, of one size.
        self.uniform = len(self.sizes) == 1 and not (self._states or self._cross)
        self._changes = 0
        self._gathered: tuple[np.ndarray, int, tuple[np.ndarray, ...]] | None = None

    def check_crossed(self, given: Sequence[int]) -> None:
        """Raise RequestError unless there is room for what layers of cross attention look at;
        given: outputs of an encoder, run by run.
        """
        needed = max((group.room_for(given) for group in self._cross), default=sum(given))
        if needed > self.crossed:
            words = f"an encoder's input of {sum(given)} tokens: at most {self.crossed}"
            raise RequestError(words, "prompt")

    @property
    def usage(self) -> float:
        """Share of all blocks that rows hold, 0 to 1."""
        total = sum(group.pool.blocks - 1 for group in self.groups)
        return sum(group.pool.used for group in self.groups) / total if total else 0.0

    def most(self, chunk: int) -> int:
        """How many tokens a row can have that has all pools to itself."""
        return min((group.most(chunk) for group in self.groups), default=_BOUNDLESS)

    def lookup(self, names: Mapping[int, Sequence[bytes]], most: int) -> Hit:
        """The longest cached prefix of at most `most` tokens. names: block size -> names.

        What one group lacks shortens the prefix for all, and a window looks at other blocks of a
        shorter prefix: the groups are asked in turn until all agree, which also makes the length
        whole blocks of each.
        """
        tokens, agreed = most, -1
        while tokens != agreed:
            agreed = tokens
            for group in self.groups:
                if tokens:
                    tokens = group.match(names[group.size][: tokens // group.size]) * group.size
        if not tokens:
            return Hit(0, tuple([] for _ in self.groups))
        return Hit(tokens, tuple(g.found(names[g.size][: tokens // g.size]) for g in self.groups))

    def admit(
        self, row: int, hit: Hit, known: int, end: int, spare: float, encoded: Sequence[int] = ()
    ) -> bool:
        """Blocks for a new row of `known` tokens whose first step reaches `end`; encoded: what its
        encoder gives to cross attention, run by run.

        False, and no change, when less than the share `spare` of a pool would stay free.
        """
        self._changes += 1
        one = np.array([row])
        for cross in self._cross:
            cross.lengths[row] = cross.room_for(encoded)
        for group, blocks in zip(self.groups, hit.blocks, strict=True):
            group.adopt(row, blocks)
        lacks = [g.lack(one, np.array([g.claim(known, end)])) for g in self.groups]
        for group, lack in zip(self.groups, lacks, strict=True):
            wanted = 0 if lack is None else group.price(lack)
            if wanted + int(spare * group.pool.blocks) > group.pool.free:
                self.release(row)
                return False
        self._extend(one, lacks)
        return True

    def grow(self, rows: np.ndarray, ends: np.ndarray) -> bool:
        """Blocks for rows that become `ends` tokens long; False, and no change, if too few."""
        lacks = [group.lack(rows, ends) for group in self.groups]
        for group, lack in zip(self.groups, lacks, strict=True):
            if lack is not None and group.price(lack) > group.pool.free:
                return False
        self._extend(rows, lacks)
        return True

    def reserve(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Blocks, as far as there are enough, for tokens up to `ends` that may come to the rows."""
        paged = [group for group in self.groups if not isinstance(group, _State)]
        lacks = [group.lack(rows, ends) for group in paged]
        for group, lack in zip(paged, lacks, strict=True):
            if lack is not None and group.price(lack) <= group.pool.free:
                self._changes += 1
                group.extend(rows, lack)

    def room(self, rows: np.ndarray) -> np.ndarray:
        """[rows] how long each can become with the blocks that it has."""
        room = np.full(len(rows), _BOUNDLESS)
        for group in self.groups:
            if isinstance(group, _Cross):
                continue
            np.minimum(room, group.room[rows], out=room)
        return room

    def lend(
        self, rows: np.ndarray, drafted: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray | None, ...]]:
        """Slots for the states that the rows' `drafted` tokens leave: how many drafts have one
        in every group, and the slots as in `Plan.state_slots`.
        """
        for group in self._states:
            before = np.cumsum(drafted) - drafted
            drafted = np.clip(group.pool.free - before, 0, drafted)
        return drafted, tuple(
            group.lend(rows, drafted, starts) if isinstance(group, _State) else None
            for group in self.groups
        )

    def settle(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Rows that borrowed slots for states stand at `ends` tokens."""
        for group in self._states:
            for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
                self._changes += group.settle(row, end)

    def _extend(self, rows: np.ndarray, lacks: Sequence[np.ndarray | None]) -> None:
        for group, lack in zip(self.groups, lacks, strict=True):
            if lack is not None:
                self._changes += 1
                group.extend(rows, lack)

    def register(self, row: int, size: int, names: Sequence[bytes], first: int) -> None:
        """The row's full blocks from `first` on may be found by `names` from now on."""
        for group in self.groups:
            if group.size == size:
                group.register(row, names, first)

    def passed(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """A step took the rows to `ends` tokens, and what it filled is registered."""
        for group in self.groups:
            group.passed(rows, ends)

    def trim(self, rows: np.ndarray, committed: np.ndarray) -> None:
        """Give back what fell out of the rows' windows; `committed`: tokens surely computed."""
        for group in self.groups:
            self._changes += group.trim(rows, committed)

    def release(self, row: int) -> None:
        """Give back all that a row holds."""
        self._changes += 1
        for group in self.groups:
            group.release(row)

    def forget(self) -> None:
        """Empty the prefix cache; rows keep what they hold."""
        for group in self.groups:
            group.index.clear()
            group.pool.unmark()

    def tables(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Each group's table of the rows: [rows, most blocks held] int32, not to be changed."""
        kept = self._gathered
        if kept is not None and kept[0] is rows and kept[1] == self._changes:
            return kept[2]
        tables = tuple(
            group.tables[:, : int(group.held[rows].max(initial=0))].take(rows, axis=0)
            for group in self.groups
        )
        self._gathered = (rows, self._changes, tables)
        return tables
