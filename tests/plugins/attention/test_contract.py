"""Every installed attention backend keeps the contract: the kit that plugin authors run."""

from __future__ import annotations

import pytest
from samples import parametrize_sample

from modulm.plugins import manager
from modulm.testing.attention import check_attention
from modulm.testing.kit import KitNotRun

#: `pallas` is checked in platforms/tpu_checks.py, in a process of its own.
BACKENDS = [d.name for d in manager.current().names("attention") if d.name != "pallas"]


@parametrize_sample("name", BACKENDS, every=2)
def test_contract(name, pytestconfig):
    if name == "cpu_paged":
        pytest.importorskip(
            "modulm_kernels_cpu", reason="no compiled CPU kernels: make setup says why"
        )
    try:
        quick = not pytestconfig.getoption("everything")
        check_attention(manager.current().load("attention", name), quick=quick)
    except KitNotRun as reason:
        pytest.skip(str(reason))
