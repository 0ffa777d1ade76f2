"""Real distributions, made in a temporary folder that is put on the path."""

from __future__ import annotations

import pytest

from pytest_modulm import Installation

Install = Installation

DRIVER = """
    from modulm.contracts.policy import Policy

    class Shortest(Policy):
        name = "shortest"
        api = 1

        def key(self, request):
            return request.prompt_len

        def victim(self, running):
            return 0
"""


@pytest.fixture
def driver() -> str:
    """Source of a module with a complete scheduling policy `Shortest`."""
    return DRIVER


@pytest.fixture
def install(modulm_install: Installation) -> Installation:
    """Install distributions; see `pytest_modulm`."""
    return modulm_install
