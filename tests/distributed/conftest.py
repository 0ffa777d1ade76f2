"""Ranks for all tests here: their processes are started once."""

import pytest

from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm_distributed.testing import PoolExecutor, RankPool


@pytest.fixture(scope="session")
def pool():
    PoolExecutor.pool = RankPool(4)
    yield PoolExecutor.pool
    PoolExecutor.pool.close()


@pytest.fixture
def plugins(pool):
    """Where the executor "pool" runs its ranks in processes that are there already."""
    with manager.using(PluginManager()) as plugins:
        plugins.register("executors", "pool", "modulm_distributed.testing:PoolExecutor")
        yield plugins
