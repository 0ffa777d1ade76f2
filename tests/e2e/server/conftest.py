"""Tiny checkpoints for servers that run a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from modulm.testing.checkpoints import make_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))
