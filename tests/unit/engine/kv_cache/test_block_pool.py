"""The block pool against a model of it made of plain lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modulm.engine.kv_cache.block_pool import NULL, BlockPool
from modulm.errors import EngineError
from modulm.testing.engines import free_blocks

BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """free: the expected free list; tables: what rows hold; cached: blocks marked as content."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(BLOCKS, self.evicted.append)
        self.free = list(range(1, BLOCKS))
        self.tables: list[list[int]] = []
        self.cached: set[int] = set()

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(EngineError):
                self.pool.take(count)
            return
        expected, self.free = self.free[:count], self.free[count:]
        self.evicted.clear()
        assert self.pool.take(count) == expected
        assert self.evicted == [block for block in expected if block in self.cached]
        self.cached -= set(expected)
        self.tables.append(expected)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        held = sorted({block for table in self.tables for block in table})
        block = data.draw(st.sampled_from(held))
        self.pool.mark(block)
        self.cached.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True, min_size=1))
        self.pool.share([NULL, *blocks])
        self.free = [block for block in self.free if block not in blocks]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release([NULL, *table])
        for block in reversed(table):
            if not any(block in other for other in self.tables):
                self.free = [*self.free, block] if block in self.cached else [block, *self.free]

    @invariant()
    def agrees(self) -> None:
        assert free_blocks(self.pool) == self.free
        assert self.pool.free == len(self.free)
        assert self.pool.used == BLOCKS - 1 - len(self.free)
        for block in range(1, BLOCKS):
            assert self.pool.refs(block) == sum(table.count(block) for table in self.tables)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(5)
    first, second = pool.take(2), pool.take(2)
    for block in (*first, *second):
        pool.mark(block)
    pool.release(second)
    pool.release(first)
    assert free_blocks(pool) == [*reversed(second), *reversed(first)]


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(3)
    taken = pool.take(1)
    pool.release(taken)
    with pytest.raises(EngineError, match="more often"):
        pool.release(taken)
