"""No process of ours imports what lies in the directory that it is started in."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from modulm.config import EngineConfig
from modulm.errors import CheckpointError
from modulm.plugins import PluginManager
from modulm_server.api_workers import Workers
from modulm_server.engine.process_client import ProcessCoreClient
from modulm_server.engine.spawn import EngineProcess

NAMES = ("json", "typing", "re", "click", "attrs", "logging", "msgspec", "numpy", "modulm_plugin_x")


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, full of modules that write down that they ran, and fail."""
    ran = tmp_path / "ran"
    for name in NAMES:
        folder = tmp_path / name
        folder.mkdir()
        source = f"open({str(ran)!r}, 'a').write(__name__ + ' ')\nraise ImportError('poisoned')\n"
        (folder / "__init__.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    return ran


def run_to_end(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["modulm", "modulm.cli.main"])
def test_the_command_line(poisoned: Path, module: str) -> None:
    done = run_to_end(sys.executable, "-m", module, "plugins", "list", "schedulers")
    assert "modulm-scheduler-fcfs" in done.stdout, done.stderr
    assert not poisoned.exists()


def test_another_programs_path_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = tmp_path / "app"
    app.mkdir()
    monkeypatch.chdir(tmp_path)
    (app / "__init__.py").write_text("import modulm")
    (app / "__main__.py").write_text("import sys; print(sys.path[0])")
    done = run_to_end(sys.executable, "-m", "app", "-m", "modulm")
    assert done.stdout.strip() == str(tmp_path), done.stderr


def test_the_engines_process(poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), ""]))
    process = EngineProcess()
    try:
        process.start(EngineConfig.from_keywords(model="no/such/folder"), PluginManager())
        with pytest.raises(CheckpointError, match="no/such/folder"):
            ProcessCoreClient(process.address, print, print, process)
    finally:
        process.close()
    assert not poisoned.exists()


def test_a_server_process(poisoned: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as sock,
        Workers(1, sock, "/no/engine/here", 0.0) as workers,
    ):
        workers._processes[0].wait(300)
        workers._processes.clear()
    assert "there is no engine at /no/engine/here" in capfd.readouterr().err
    assert not poisoned.exists()
