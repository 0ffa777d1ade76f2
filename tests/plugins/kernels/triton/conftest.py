"""Every test here runs on the GPU if there is one, else in Triton's interpreter.

That is decided when a kernel's file is imported, so the variable is set before any is. Interpreted
kernels run each pair of a test's parameters, and whole grids with `make test-all`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from samples import keep_covering
from tests.plugins.kernels.triton.quick import quicken

GPU = torch.cuda.is_available() or torch.xpu.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    if not GPU and not metafunc.config.getoption("everything"):
        keep_covering(metafunc, lambda _: 2)


@pytest.fixture(autouse=True, scope="session")
def triton() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed; it is there on Linux after make setup")
    if not GPU:
        quicken()


@pytest.fixture
def device() -> torch.device:
    if not GPU:
        return torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "xpu")


@pytest.fixture
def ops():
    import modulm_kernels_triton

    return modulm_kernels_triton.ops()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
