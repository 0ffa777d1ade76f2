"""The fixtures. Every pytest process imports this module: it imports nothing of modulm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx

    from modulm_frontend.llm import LLM
    from modulm_server.testing import Live
    from pytest_modulm.faults import Faults
    from pytest_modulm.installation import Installation
    from pytest_modulm.kits import KitRunner

#: Flags of the tiny engine.
_TINY: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "cpu_threads": 1,
    "disable_frontend_multiprocessing": True,
    "kv_cache_memory_bytes": 1 << 24,
    "max_model_len": 128,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="session")
def modulm_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama of two layers with a tokenizer."""
    from modulm.testing.checkpoints import make_tiny

    return make_tiny(tmp_path_factory.mktemp("modulm") / "tiny")


@pytest.fixture(scope="session")
def modulm_flags() -> dict[str, Any]:
    """Flags of the tiny engine and server. Override it to add your plugin's."""
    return {}


@pytest.fixture(scope="session")
def modulm_engine(modulm_checkpoint: Path, modulm_flags: dict[str, Any]) -> Iterator[LLM]:
    """An engine (`LLM`) with the tiny checkpoint, on the CPU."""
    from modulm import LLM

    llm = LLM(str(modulm_checkpoint), **{**_TINY, **modulm_flags})
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def modulm_server(modulm_checkpoint: Path, modulm_flags: dict[str, Any]) -> Iterator[Live]:
    """A server with the tiny checkpoint on a free port; its model is called "tiny"."""
    from modulm import AsyncLLM
    from modulm.config import EngineConfig
    from modulm_server.testing import serve_in_thread

    flags = {**_TINY, "served_model_name": "tiny", **modulm_flags}
    config = EngineConfig.from_keywords(model=str(modulm_checkpoint), **flags)
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live:
            yield live
    finally:
        engine.shutdown()


@pytest.fixture
def modulm_client(modulm_server: Live) -> Iterator[httpx.Client]:
    """An HTTP client (httpx) of the tiny server."""
    with modulm_server.client() as client:
        yield client


@pytest.fixture
def modulm_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    """Installs distributions into a folder of the test: name, entry points, modules, version."""
    from pytest_modulm.installation import Installation

    monkeypatch.syspath_prepend(str(tmp_path))
    installation = Installation(tmp_path)
    yield installation
    installation.forget()


@pytest.fixture
def modulm_faults(
    monkeypatch: pytest.MonkeyPatch, modulm_install: Installation
) -> Iterator[Faults]:
    """Makes methods raise, hang or return a wrong shape, and installs broken drivers."""
    from pytest_modulm.faults import Faults

    faults = Faults(monkeypatch, modulm_install)
    yield faults
    faults.end()


@pytest.fixture
def modulm_kit() -> KitRunner:
    """Runs the contract kit of a kind on a driver: `modulm_kit("schedulers", MyPolicy)`."""
    from pytest_modulm.kits import KitRunner

    return KitRunner()
