"""Every installed platform keeps the contract: the kit that plugin authors run."""

from __future__ import annotations

import pytest

from modulm.plugins import manager
from modulm.testing.platform import check_platform

PLATFORMS = [declared.name for declared in manager.current().names("platforms")]


@pytest.mark.parametrize("name", PLATFORMS)
def test_contract(name):
    check_platform(manager.current().load("platforms", name))
