"""Every installed quantization method keeps the contract: the kit that plugin authors run."""

from __future__ import annotations

import pytest

from modulm.plugins import manager
from modulm.testing.quantization import check_quantization

METHODS = [declared.name for declared in manager.current().names("quantization")]


@pytest.mark.parametrize("name", METHODS)
def test_contract(name):
    check_quantization(manager.current().load("quantization", name))
