"""`modulm serve` with an installed hook plugin that ends its process: restarted, or isolated."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from tests.e2e.server.test_serve import started

from pytest_modulm import Installation

HOOK = """
    import os
    from pathlib import Path
    from modulm.plugins import hookimpl

    MARK = Path({mark!r})

    @hookimpl
    def modulm_step_finished(stats):
        if MARK.exists():
            if {once}:
                MARK.unlink()
            os._exit(3)
"""
BODY = {"model": "M", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def mark(modulm_install: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that makes the plugin end its process: once, or in every step."""
    monkeypatch.setenv("PYTHONPATH", str(modulm_install.folder))
    return tmp_path / "mark"


def install(modulm_install: Installation, mark: Path, *, once: bool) -> None:
    source = HOOK.format(mark=str(mark), once=once)
    modulm_install("modulm-a", {"modulm": {"ends": "mod_a"}}, {"mod_a": source})


def complete(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=BODY, timeout=300)


@pytest.mark.exhaustive
def test_a_hook_that_ends_the_engine_is_survived_by_a_restart(
    tiny_folder: Path, modulm_install: Installation, mark: Path
) -> None:
    install(modulm_install, mark, once=True)
    with started(tiny_folder, "--restart") as process:
        assert complete(process.url).status_code == 200
        mark.touch()
        lost = complete(process.url)
        assert lost.status_code in (200, 500, 503), lost.text
        end = time.monotonic() + 300
        while httpx.get(f"{process.url}/health").status_code != 200:
            assert time.monotonic() < end, process.log.read_text()
            time.sleep(0.1)
        (replica,) = httpx.get(f"{process.url}/health").json()["replicas"]
        assert (replica["status"], replica["restarts"]) == ("ok", 1)
        assert complete(process.url).status_code == 200
        assert process.end() == 0


@pytest.mark.exhaustive
def test_an_isolated_hook_that_ends_its_process_is_survived_by_all(
    tiny_folder: Path, modulm_install: Installation, mark: Path
) -> None:
    install(modulm_install, mark, once=False)
    mark.touch()
    with started(tiny_folder, "--isolate", "modulm-a") as process:
        for _ in range(2):
            answer = complete(process.url)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 3
        health = httpx.get(f"{process.url}/health")
        assert health.status_code == 200
        assert "modulm-a 1.0" in process.log.read_text()
        assert process.end() == 0
