"""Processes that cannot be started: no room for a fork, no memory, no descriptors."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.media.files import image_file

from modulm.config import EngineConfig
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import EngineError, ModulmError, PluginBroken, QueueFull
from modulm_chat.sandbox import SandboxedRenderer
from modulm_executor_mp.executor import MpExecutor
from modulm_media.workers import DecodeWorkers
from modulm_server.api_workers import Workers
from modulm_server.app import Served, create_app
from modulm_server.engine.launch import load_library
from modulm_server.engine.spawn import EngineProcess
from modulm_server.flags import ServerConfig
from modulm_server.route import RouteFamily
from modulm_server.scripted import ScriptedEngine
from modulm_server.serve import make_server, open_socket
from modulm_server.testing import serve_in_thread
from modulm_structured_output.compile_process import _Process

#: Open files of this process.
OPEN = Path("/proc/self/fd")
ERRORS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE)
START = subprocess.Popen


class Machine:
    """A machine with room for so many more processes, which only sleep."""

    def __init__(self, room: int, code: int) -> None:
        self.room, self.code = room, code
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Any, **options: Any) -> subprocess.Popen[bytes]:
        if not self.room:
            raise OSError(self.code, os.strerror(self.code))
        self.room -= 1
        self.processes.append(START(["sleep", "600"], **options))
        return self.processes[-1]


def decode() -> None:
    workers = DecodeWorkers(1)
    for _ in range(2):  # the place of the one that failed is free again
        with pytest.raises(QueueFull, match="no process can be started to decode"):
            workers.decode("image", image_file(Image.new("RGB", (6, 4))), {})
    assert workers.running == 0
    workers.close()
    raise QueueFull("told")


def ranks() -> None:
    config = EngineConfig.from_keywords(model="M", tensor_parallel_size=2)
    MpExecutor().start(config)


def serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Workers(2, listener, "/no/engine", 0.0)


#: What starts a process: how, how many it starts before the one that fails, and the error.
PLACES: dict[str, tuple[Callable[[], object], int, type[ModulmError]]] = {
    "compile a constraint": (lambda: _Process(()), 0, QueueFull),
    "render a template": (lambda: SandboxedRenderer().render("x", {}), 0, QueueFull),
    "decode a file": (decode, 0, QueueFull),
    "the engine": (EngineProcess, 0, EngineError),
    "further server processes": (serve, 1, EngineError),
    "ranks": (ranks, 1, EngineError),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_process_that_cannot_be_started(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clear error that can be tried again; no process, file or descriptor is left."""
    start, before, kind = PLACES[place]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for code in ERRORS:
        machine = Machine(before, code)
        descriptors = {one.name for one in OPEN.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", machine.start)
            with pytest.raises(kind) as caught:
                start()
        if place != "decode a file":
            assert os.strerror(code) in str(caught.value)
        for process in machine.processes:
            assert process.poll() is not None
        del caught
        end = time.monotonic() + 300  # a thread closes the output of a server process
        while left := {one for one in OPEN.iterdir() if one.name not in descriptors}:
            if not any(one.exists() for one in left):
                break
            assert time.monotonic() < end, [os.readlink(one) for one in left if one.exists()]
        assert not list(tmp_path.iterdir())


def test_an_engine_that_cannot_be_killed_does_not_hold_its_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device's driver may keep a killed process. The server ends, and says so."""

    def never(timeout: float) -> int:
        raise subprocess.TimeoutExpired("engine", timeout)

    machine = Machine(1, errno.EAGAIN)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", machine.start)
        engine = EngineProcess()
    (process,) = machine.processes
    with monkeypatch.context() as patch:
        patch.setattr(process, "wait", never)
        engine.close()
    assert f"process {process.pid} was killed and has not ended" in caplog.text
    assert not Path(engine.address).parent.exists()
    assert process.wait() == -signal.SIGKILL


def test_a_server_process_is_restarted_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts that fail do not count as deaths, which would end the service."""
    machine = Machine(1, errno.EAGAIN)
    monkeypatch.setattr(subprocess, "Popen", machine.start)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Workers(1, listener, "/no/engine", 0.0) as workers,
    ):
        machine.processes[0].kill()
        machine.processes[0].wait()
        for _ in range(10):
            assert workers.check()
        assert len(machine.processes) == 1
        machine.room = 1
        assert workers.check()
        assert machine.processes[1].poll() is None
        machine.processes[1].terminate()
    assert machine.processes[1].poll() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere importing torch loads it")
def test_the_library_that_torch_loads_is_found_without_it() -> None:
    assert load_library()


def test_hook_plugins_do_not_import_torch_in_a_front_end() -> None:
    """They would take longer there than all else, and the engine waits for its configuration."""
    script = """if True:
        import sys
        from modulm.plugins import manager
        manager.current().load_hooks()
        print(sorted({"torch", "transformers", "modulm_transformers.hooks"} & sys.modules.keys()))
    """
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ran.stdout == "['modulm_transformers.hooks']\n"


@pytest.mark.parametrize("place", ["start", "later", "end"])
def test_a_start_that_fails_closes_what_it_opened(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """And a server that fails later, or at its end."""
    config = EngineConfig.from_keywords(model="M", host="127.0.0.1", port=0)
    flags, own, stopped = config.group(ServerConfig), [], []
    stop = Served.stop

    async def count(served: Served) -> None:
        if served in own:  # servers that tests share may end meanwhile
            stopped.append(served)
        await stop(served)

    async def fail(*_: Any) -> bool:
        raise OSError("no room")

    def serve() -> int:
        engine = ScriptedEngine(tokenizer)
        own.append(create_app(engine, config))
        server = make_server(own[-1], flags)
        if place == "start":
            monkeypatch.setattr(Served, "start", fail)
        elif place == "later":
            server.on_tick = fail  # type: ignore[method-assign]
        else:
            engine.drain = fail  # type: ignore[method-assign, assignment]
            server.announce = lambda: setattr(server, "should_exit", True)
        with pytest.raises(OSError, match="no room"):
            server.serve_on(open_socket(flags))
        return len(os.listdir(OPEN))

    monkeypatch.setattr(Served, "stop", count)
    first = serve()
    assert serve() <= first
    assert len(stopped) == 2


def test_routes_that_cannot_start_end_the_start(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error that names them; no server runs without routes that it has announced."""
    engine, config = ScriptedEngine(tokenizer), EngineConfig.from_keywords(model="M")

    async def fail(family: RouteFamily) -> None:
        if family.context.engine is engine:  # not a server that tests share
            raise OSError("no room")

    for family in create_app(engine, config).families:
        if family.name == "files":
            monkeypatch.setattr(type(family), "start", fail)
    expected = "the routes of 'files' could not be started: no room"
    with (
        pytest.raises(PluginBroken, match=expected),
        serve_in_thread(engine, config) as live,
    ):
        live.client().get("/health")
