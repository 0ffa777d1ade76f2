"""Every test here runs on each level that this machine has. The best level, which servers use, gets
the whole grid of a test's parameters, and the others a part in which each pair of values occurs.
`make test-all` runs whole grids.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from samples import keep_covering

kernels = pytest.importorskip(
    "modulm_kernels_cpu", reason="no compiled CPU kernels: make setup says why"
)


LEVELS = kernels.levels()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    if not metafunc.config.getoption("everything"):
        best = (None, LEVELS[-1])
        keep_covering(metafunc, lambda values: len(values) if values.get("level") in best else 2)


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
