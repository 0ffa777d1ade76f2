"""Block pool: which blocks of cache memory are free, and the order in which they are reused.

A block is a fixed number of token slots. Blocks never move, and a row's block table grows only at
its end. Block 0 is the null block: it pads tables and is never allocated.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from modulm.errors import EngineError

__all__ = ["NULL", "BlockPool"]

NULL = 0


def _ignore(block: int) -> None:
    """Default of `evict`, for pools without a prefix cache."""


class BlockPool:
    """Reference counts and the free list of one pool, in plain arrays.

    The free list is doubly linked through two arrays, so that a prefix hit can remove a block from
    its middle in constant time. Blocks are taken from the head. Released blocks go to the tail if
    they hold a cached prefix, so that prefixes are evicted in LRU order, and to the head otherwise.
    `evict` is called before a cached block is overwritten.
    """

    def __init__(self, blocks: int, evict: Callable[[int], None] = _ignore) -> None:
        if blocks < 1:
            raise EngineError(f"a pool of {blocks} blocks must have at least the null block")
        self.blocks = blocks
        self.free = blocks - 1
        self._evict = evict
        self._refs = array("i", bytes(4 * blocks))
        self._cached = bytearray(blocks)
        # Slot NULL of the links is the list's sentinel: its next is the head, its prev the tail.
        self._next = array("i", [*range(1, blocks), NULL])
        self._prev = array("i", [blocks - 1, *range(blocks - 1)])

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return self.blocks - 1 - self.free

    def refs(self, block: int) -> int:
        """Return the block's reference count."""
        return self._refs[block]

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each. Raises EngineError if fewer are free."""
        if count > self.free:
            raise EngineError(f"{count} blocks were requested, {self.free} are free")
        link, refs, cached = self._next, self._refs, self._cached
        taken = []
        block = link[NULL]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            if cached[block]:
                cached[block] = False
                self._evict(block)
            block = link[block]
        link[NULL] = block
        self._prev[block] = NULL
        self.free -= count
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; free ones leave the free list. Null blocks are skipped."""
        for block in blocks:
            if block == NULL:
                continue
            if not self._refs[block]:
                self._unlink(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int], *, first: bool = False) -> None:
        """Drop one reference from each block of a row's table, in the table's order.

        The last block is released first: the tail of a prefix is worth less than its beginning.
        first: free blocks are the next to be reused, whatever they hold.
        """
        for block in reversed(blocks):
            if block == NULL:
                continue
            left = self._refs[block] - 1
            if left < 0:
                raise EngineError(f"block {block} is released more often than it was allocated")
            self._refs[block] = left
            if not left:
                self._link(block, first)

    def mark(self, block: int) -> None:
        """Mark an allocated block as holding a cached prefix."""
        self._cached[block] = True

    def unmark(self) -> None:
        """Unmark all blocks, without calling `evict`."""
        self._cached = bytearray(self.blocks)

    def _link(self, block: int, first: bool) -> None:
        """Insert into the free list: at the head, or the tail if it holds a cached prefix."""
        before = self._prev[NULL] if self._cached[block] and not first else NULL
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.free -= 1
