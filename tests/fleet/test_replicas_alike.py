"""Replicas that would answer differently from one another are refused by name."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from modulm.config import EngineConfig
from modulm.contracts.engine_info import EngineInfo
from modulm.errors import ConfigError
from modulm_server.engine.replica_processes import check_alike

INFO = EngineInfo(
    config=EngineConfig(), models=("M",), path="here", architecture="A", max_model_len=256,
    vocabulary=100, hidden=8, dtype="float32", eos=(2,), parts={"adapters": {"slots": 2}},
)  # fmt: skip


def test_paths_and_caches_may_differ() -> None:
    check_alike(INFO, attrs.evolve(INFO, path="there", cache_tokens=9, notes=("small",)), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"models": ("N",)}, r"replica 3 has models \('N',\), the first \('M',\)"),
        ({"vocabulary": 101}, "vocabulary 101, the first 100"),
        ({"tasks": ("embed",)}, "tasks"),
        ({"parts": {}}, "adapters 0, the first 2"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_alike(INFO, attrs.evolve(INFO, **change), 3)
