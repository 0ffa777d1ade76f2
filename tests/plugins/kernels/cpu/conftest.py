"""Every test here runs on each level that this machine has. The best one, which servers use, gets
the whole grid of a test's parameters; the others get a part in which each value still occurs, and
each pair of values where there are three parameters or more. `make test-all` runs whole grids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch

kernels = pytest.importorskip(
    "modulm_kernels_cpu", reason="no compiled CPU kernels: make setup says why"
)


LEVELS = kernels.levels()


def covering(rows: Sequence[tuple[str, ...]]) -> set[int]:
    """Indices of rows that hold each value of each column, or each pair if columns are many."""
    width = len(rows[0])
    size = 2 if width > 2 else 1
    covered = [
        {(columns, tuple(row[c] for c in columns)) for columns in combinations(range(width), size)}
        for row in rows
    ]
    missing, chosen = set().union(*covered), set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(covered[index] & missing))
        chosen.add(best)
        missing -= covered[best]
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what `covering` does not choose for levels other than the best."""
    if config.getoption("--everything", default=False):
        return
    grids = defaultdict(list)
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        here = item.path.parent == Path(__file__).parent
        if here and given.get("level", LEVELS[-1]) != LEVELS[-1]:
            grids[item.path, item.originalname, given["level"]].append(item)
    left_out = set()
    for grid in grids.values():
        names = sorted(grid[0].callspec.params.keys() - {"level"})
        chosen = covering([tuple(repr(item.callspec.params[n]) for n in names) for item in grid])
        left_out |= {item for index, item in enumerate(grid) if index not in chosen}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ops(level):
    return kernels.ops(level)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def quiet_torch() -> Iterator[None]:
    """Twins on one thread: on small tensors torch's own threads only get in the way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def library(level) -> Iterator[kernels.Library]:
    library = kernels.load(level)
    yield library
    library.set_threads(0)
