"""The contract kit of KV connectors over a package of somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modulm.testing.kv_connectors import check_connector


@pytest.mark.parametrize("fails", [0, 1])
def test_the_kit_runs_over_a_package(tmp_path: Path, installed: Any, fails: int) -> None:
    with installed("connector", tmp_path) as manager:
        driver = manager.load("kv_connectors", "faulty")
        options = manager.options("kv_connectors", "faulty", {"rank": 0, "loads": fails})
        if not fails:
            check_connector(lambda: driver(options))
            return
        with pytest.raises(AssertionError, match="a load has failed"):
            check_connector(lambda: driver(options))
