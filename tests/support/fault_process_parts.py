"""What reaches the awaits, socket and file operations of processes of their own, and of what only a
start or a failure reaches: one short use of a part each, in this process.

Each raises what its callers handle, or gives the right result.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from fault_parts import PARTS, Part
from fault_server_parts import Sleeper

from modulm.config import EngineConfig
from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import CheckpointError, ConfigError, ModulmError, RequestError
from modulm.plugins.manager import PluginManager
from modulm_chat.sandbox import SandboxedRenderer
from modulm_distributed import worker_process
from modulm_distributed.tls import Connection, tls_contexts
from modulm_executor_mp import executor as mp_executor
from modulm_isolation import child
from modulm_kv_disk import connector as disk
from modulm_kv_peer.client import PeerClient
from modulm_kv_peer.server import PeerServer
from modulm_kv_peer.wire import Deadline, Fault
from modulm_media import decode_worker
from modulm_server import api_worker, serve
from modulm_server.engine import engine_process, spawn
from modulm_server.engine.process_client import ProcessCoreClient
from modulm_server.memory_metrics import EngineMemory
from modulm_server.models import serve as serve_several
from modulm_server.tool_servers import ServerSettings, ToolServer, ToolServerError
from modulm_structured_output import compile_process
from modulm_wire import frames


def _part(run: Part) -> Part:
    PARTS[run.__name__.replace("_", " ")] = run
    return run


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _signals_kept() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _closed(descriptor: int) -> None:
    """Close a descriptor that a process was to inherit, unless it has done so."""
    with suppress(OSError):
        os.close(descriptor)


# The main functions of processes.


@_part
def a_further_server_process(folder: Path) -> None:
    """Its connection to the engine is closed, whatever happens."""
    made, ended = [], []
    config = EngineConfig()

    def connect(address: str) -> Any:
        made.append(1)
        return engine

    engine = SimpleNamespace(
        info=SimpleNamespace(config=config), shutdown=lambda: ended.append(1), dead=None
    )
    server = SimpleNamespace(serve_on=lambda sock: sock.close())
    ours, theirs = socket.socketpair()
    descriptor = theirs.detach()
    try:
        with ours, _signals_kept(), _replaced(
            api_worker, bound_arenas=_nothing, unblock=_nothing, share_interpreter=_nothing,
            configure_logging=_nothing, create_app=_nothing, make_server=lambda *_: server,
            AsyncLLM=SimpleNamespace(connect=connect),
        ):  # fmt: skip
            assert api_worker.main(descriptor, "/none") == 0
    finally:
        _closed(descriptor)
        assert ended == made


@_part
def a_process_of_a_rank(folder: Path) -> None:
    """It ends when its executor has gone."""
    ours, theirs = socket.socketpair()
    ours.close()
    descriptor = theirs.detach()
    try:
        with _signals_kept():
            worker_process.main(str(descriptor))
    finally:
        _closed(descriptor)


@_part
def a_process_of_a_plugin(folder: Path) -> None:
    """It confines itself, and ends with its starter."""
    ours, theirs = socket.socketpair()
    mine, yours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors = theirs.detach(), yours.detach()
    own = SimpleNamespace(dup2=_nothing)
    channel = child.Channel(ours)
    try:
        with ours, mine, _signals_kept(), _replaced(
            child, confine=lambda *_: [], _end_with=_nothing, os=own,
        ):  # fmt: skip
            from modulm_isolation import child as imported

            setup = {"path": imported.sys.path[:], "imports": [], "confinement": [0, 1, 1, []]}
            try:
                channel.send(setup)
            except child.Closed as error:
                raise OSError("it has gone") from error
            thread = threading.Thread(target=_shut_after_answer, args=(channel,))
            thread.start()
            try:
                child.main(*descriptors)
            finally:
                with suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)
                thread.join(300)
    finally:
        for descriptor in descriptors:
            _closed(descriptor)


def _shut_after_answer(channel: Any) -> None:
    with suppress(child.Closed, OSError):
        channel.receive()
    with suppress(OSError):
        channel.socket.shutdown(socket.SHUT_RDWR)


@_part
def a_process_that_decodes(folder: Path) -> None:
    """It ends with its input, and what libraries print is no answer."""
    import resource

    answers = (folder / "answers").open("wb")
    own = SimpleNamespace(
        dup=lambda _: os.dup(answers.fileno()), dup2=lambda one, _: os.close(one), open=os.open,
        fdopen=os.fdopen, devnull=os.devnull, O_WRONLY=os.O_WRONLY, nice=_nothing,
    )  # fmt: skip
    given = SimpleNamespace(stdin=SimpleNamespace(buffer=io.BytesIO(b"")))
    with answers, _replaced(decode_worker, os=own, sys=given), _replaced(
        resource, setrlimit=_nothing
    ):  # fmt: skip
        decode_worker._serve(1 << 30)


@_part
def sockets_of_an_engines_process(folder: Path) -> None:
    """It ends if it cannot serve its owner, and closes what it was given."""
    for secret in (None, b"s" * 64):
        ours, theirs = socket.socketpair()
        with ExitStack() as stack:
            stack.enter_context(ours)
            if secret is None:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(folder / "engine"))
                listener.listen()
            else:
                listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            tls = None if secret is None else tls_contexts(secret)
            server = engine_process._SocketServer(theirs, listener, tls)
            ours.settimeout(300)
            try:
                ours.sendall(frames.pack("start", 1, 2))
                if server.started.result(300) != [1, 2]:
                    raise OSError("another frame")
                server.flush()
            except ModulmError:
                server._thread.join(300)
                server._loop.close()
                if ours.recv(1):
                    raise AssertionError("its owner does not see the end") from None
                raise
            finally:
                if not server._loop.is_closed():
                    server.end()
                theirs.close()


@_part
def an_engines_main_process(folder: Path) -> None:
    """It ends at once without an owner."""
    for tcp in (False, True):
        ours, theirs = socket.socketpair()
        ours.close()
        secret = folder / "secret"
        secret.write_text("0" * 64)
        secret.chmod(0o600)
        if tcp:
            listener = socket.create_server(("127.0.0.1", 0))
        else:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(folder / "engine"))
            listener.listen()
        descriptors = theirs.detach(), listener.detach()

        class Served:
            """Instead of the sockets' thread, which `sockets_of_an_engines_process` uses."""

            def __init__(self, owner: socket.socket, listening: socket.socket, tls: Any) -> None:
                assert (tls is not None) is (listening.family != socket.AF_UNIX)
                owner.close()
                listening.close()

            def remove_folder(self) -> None:
                """There is none."""

        try:
            with _signals_kept(), _replaced(
                engine_process, _SocketServer=Served, _run=lambda *_: 0, watch_imports=_nothing
            ):  # fmt: skip
                assert engine_process.main(*descriptors, str(secret) if tcp else "") == 0
        finally:
            for descriptor in descriptors:
                _closed(descriptor)


# What starts processes.


@_part
def an_engine_that_is_told_what_it_runs(folder: Path) -> None:
    with _replaced(spawn.tempfile, tempdir=str(folder)), _replaced(spawn, _GRACE=0.01):
        with Sleeper().started():
            engine = spawn.EngineProcess()
            try:
                engine.start(EngineConfig(), PluginManager())
            finally:
                engine.close()
        assert not list(folder.iterdir())


@_part
def a_front_end_that_sends_much(folder: Path) -> None:
    """A thread sends what the engine does not read at once."""
    size, got = 4 << 20, 0
    ours, theirs = socket.socketpair()
    client = ProcessCoreClient.__new__(ProcessCoreClient)
    client._peer, client._connection = ours, Connection(ours)
    client._lock, client._unsent = threading.Lock(), SimpleQueue()
    client._behind, client._sender = 0, None
    with ours, theirs:
        theirs.settimeout(300)
        client._send(bytes(size))
        client._unsent.put(None)
        sender = client._sender
        assert sender is not None
        ending = threading.Thread(target=lambda: (sender.join(300), ours.close()))
        ending.start()
        while piece := theirs.recv(1 << 16):
            got += len(piece)
        ending.join(300)
        assert not sender.is_alive()
    if got != size:
        raise OSError("the engine sees the end of the connection")


@_part
def ranks_in_processes(folder: Path) -> None:
    """No process and no folder is left."""
    mp_executor._is_stopped(os.getpid())
    one = mp_executor.MpExecutor()
    config = EngineConfig.from_keywords(tensor_parallel_size=2)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    streams: list[Any] = []
    with Sleeper().started():
        try:
            streams = [stream for stream, _ in one.connect(config)]
        finally:
            tempfile.tempdir = before
            for stream in streams:
                stream.close()
            one.end(0.0)
    assert not list(folder.iterdir())


@_part
def a_port_of_a_rank_of_ray(folder: Path) -> None:
    from modulm_executor_ray.actor import Rank

    assert Rank().free_port("127.0.0.1")


@_part
def an_address_of_a_launched_rank(folder: Path) -> None:
    """Empty where it is unknown: the address of the machine's name is used."""
    from modulm_executor_external_launcher import launched

    assert launched._own_address("127.0.0.1", 80) == ""


@_part
def a_process_of_templates(folder: Path) -> None:
    renderer = SandboxedRenderer()
    try:
        assert renderer.render("{{ 1 + 1 }}", {}) == "2"
    finally:
        renderer.close()


class Compiler:
    """Answers in a thread as the process that tries constraints does."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def __call__(self, command: Any, *, pass_fds: Any, **_: Any) -> Any:
        peer = socket.socket(fileno=os.dup(pass_fds[0]))
        self._threads.append(threading.Thread(target=self._answer, args=(peer,)))
        self._threads[-1].start()
        return SimpleNamespace(kill=_nothing, wait=lambda seconds=None: 0)

    def _answer(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream, suppress(OSError):
            while compile_process._next(stream) is not None:
                peer.sendall(frames.pack(frames.pack_error(None)))

    def join(self) -> None:
        """Wait for their ends, which the ends of their connections bring."""
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive()


@_part
def processes_that_try_constraints(folder: Path) -> None:
    """Their sockets are closed; one that cannot be asked is ended."""
    compiler = Compiler()
    config = EngineConfig()
    processes = compile_process.CompileProcesses(config, "/none", 9, (1,), PluginManager())
    try:
        with _replaced(subprocess, Popen=compiler):
            processes.check(StructuredOutputs(choice=["a"]))
    finally:
        processes.close()
        compiler.join()


@_part
def a_process_that_tries_constraints(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    told = (
        frames.pack_config(EngineConfig()), frames.pack_plugins(PluginManager().snapshot()),
        "/none", 9, [1],
    )  # fmt: skip
    failed: list[OSError] = []

    def serve_it() -> None:
        try:
            with theirs:
                try:
                    compile_process._serve(theirs)
                finally:  # as the end of a process does, whatever still has its file
                    with suppress(OSError):
                        theirs.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            failed.append(error)

    with _replaced(compile_process, _open=lambda *_: [], _limit=_nothing), ours:
        thread = threading.Thread(target=serve_it)
        thread.start()
        ours.settimeout(300)
        try:
            with ours.makefile("rb") as stream:
                ours.sendall(frames.pack(*told))
                if compile_process._next(stream) is None:
                    raise OSError("it has ended")
                ours.sendall(frames.pack({"choice": ["a"]}))
                answer = compile_process._next(stream)
                if answer is not None:
                    assert frames.unpack_error(answer[0]) is not None  # it has no backend
        finally:
            with suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            thread.join(300)
    if failed:
        raise failed[0]


# A server's start and end.


@_part
def starts_that_fail_on_a_unix_socket(folder: Path) -> None:
    """The socket is closed, and its name removed."""
    config = EngineConfig.from_keywords(model="/none", uds=str(folder / "socket"))
    quiet = {"bound_arenas": _nothing, "share_interpreter": _nothing}

    def refuse(*_: Any) -> Any:
        raise ConfigError("model", "no")

    with _replaced(serve, **quiet), suppress(CheckpointError):
        serve.serve(config, _nothing, _nothing)  # type: ignore[arg-type]
    assert not list(folder.iterdir())
    with _replaced(serve_several, **quiet, create_app=refuse), suppress(ConfigError):
        serve_several.serve_models(config, [], _nothing)
    assert not list(folder.iterdir())


@_part
def a_server_that_ends_beside_a_request(folder: Path) -> None:
    stopped = []

    class Busy:
        """An engine whose last request ends a moment after it was told."""

        dead, looks = None, 2

        @property
        def active(self) -> int:
            self.looks -= 1
            return max(0, self.looks)

        async def drain(self, seconds: float) -> bool:
            return False

    async def stop() -> None:
        stopped.append(1)

    server = serve.Server.__new__(serve.Server)
    server.workers, server.force_exit, server._patience = None, False, 0.0
    generation = SimpleNamespace(engine=Busy())
    server._served = SimpleNamespace(generation=generation, stop=stop)  # type: ignore[assignment]
    try:
        asyncio.run(server._end_requests())
    finally:
        assert stopped


@_part
def memory_of_an_engine(folder: Path) -> None:
    async def call(function: Any, seconds: float) -> Any:
        await asyncio.sleep(0)
        return [[os.getpid(), 1, True]] if function.__name__ == "expected_bytes" else [5]

    engine: Any = SimpleNamespace(process_ids=[os.getpid()], collective_rpc=call)
    memory = EngineMemory("M", engine)
    asyncio.run(memory.measure())
    assert memory._memory > 5


# Tool servers.


def _tool_server(**settings: Any) -> ToolServer:
    return ToolServer(ServerSettings(label="x", **settings), 0.5, 1 << 20)


@_part
def a_tool_server_that_breaks(folder: Path) -> None:
    """Its session is closed, in a listing and in a call that lasts too long."""

    async def fail() -> Any:
        raise ConnectionResetError

    async def wait(*_: Any) -> Any:
        await asyncio.Event().wait()

    class Session:
        """Lists nothing and answers nothing."""

        list_tools, call_tool, send_ping = map(staticmethod, (fail, wait, wait))

    async def session(server: ToolServer) -> Any:
        server._ready = asyncio.get_running_loop().create_future()
        server._ready.set_result(Session)
        return Session

    async def main() -> None:
        server = _tool_server(command=("none",))
        with _replaced(ToolServer, _session=session):
            with suppress(ToolServerError):
                await server.tools()
            server.timeout = 0.01
            outcome = await server.call("a", {})
            assert outcome.error is not None

    asyncio.run(main())


@_part
def a_tool_server_that_is_not_there(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]

    async def main() -> None:
        server = _tool_server(url=f"http://127.0.0.1:{port}/mcp")
        async with asyncio.timeout(300):
            outcome = await server.call("a", {})
            assert outcome.error is not None
            await server.close()

    asyncio.run(main())


# WebSockets.


@_part
def a_websocket(folder: Path) -> None:
    """A long message is read in a thread while others are sent."""
    import uvicorn
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    from modulm_server.websocket_protocol import WebSocketProtocol

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        message = asyncio.ensure_future(receive())
        try:
            while not message.done():
                await send({"type": "websocket.send", "text": "meanwhile"})
                await asyncio.sleep(0)
            if message.result()["type"] == "websocket.receive":
                await send({"type": "websocket.send", "text": str(len(message.result()["text"]))})
                await send({"type": "websocket.close"})
        finally:
            message.cancel()

    class Server(uvicorn.Server):
        """Leaves the signals of this process alone."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    async def main() -> str:
        last = ""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            config = uvicorn.Config(
                app, ws=WebSocketProtocol, lifespan="off", log_config=None, ws_max_size=1 << 22,
                timeout_graceful_shutdown=1,
            )  # fmt: skip
            server = Server(config)
            serving = asyncio.ensure_future(server.serve([listener]))
            try:
                async with (
                    asyncio.timeout(300),
                    connect(f"ws://127.0.0.1:{port}", compression=None) as peer,
                ):
                    sending = asyncio.ensure_future(peer.send("x" * (1 << 20)))
                    try:
                        async for text in peer:
                            last = str(text)
                    finally:
                        sending.cancel()
                        await asyncio.gather(sending, return_exceptions=True)
            finally:
                server.should_exit = True
                await serving
        return last

    try:
        last = asyncio.run(main())
    except (WebSocketException, EOFError) as error:
        raise OSError(str(error)) from error
    if last != str(1 << 20):
        raise OSError("it was closed")


# Connectors.


@_part
def blocks_of_a_disk_tier(folder: Path) -> None:
    """A damaged file is removed, and what was asked of it is computed."""
    options = disk.DiskOptions(shared_storage_path=str(folder / "tier"))
    mover = disk._Mover(options, "0" * 32, 0.5, 0.5)
    mover.open({0: [torch.zeros(4, 2, 8)]})
    try:
        path = mover._path(b"name")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"damaged")
        with suppress(disk.TransferFailed):
            mover._read(b"name", mover._bytes[0])
    finally:
        mover.close()
    if path.exists():
        raise OSError("it stays until it is written again")


@_part
def a_peer_that_refuses(folder: Path) -> None:
    client = PeerClient({}, tls_contexts(b"s" * 64), shared=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with suppress(OSError):
                listener.settimeout(300)
                listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            client.fetch(*listener.getsockname(), [b"n"], Deadline(20), lambda *_: None)
        except Fault:
            pass
        finally:
            with suppress(OSError):
                socket.create_connection(listener.getsockname(), 5).close()
            thread.join(300)
    assert not client._open


@_part
def blocks_for_a_peer(folder: Path) -> None:
    server: Any = SimpleNamespace(
        _layout=SimpleNamespace(spans=lambda tensors: [(0, 8)]),
        _store=SimpleNamespace(memory=torch.ones(1, 8, dtype=torch.uint8)),
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(300)
        try:
            PeerServer._send_part(server, ours, [0], None, Deadline(20), shared=False)  # type: ignore[arg-type]
        except Fault as error:
            raise OSError(str(error)) from error
        data = b""
        while not data.endswith(b"\1" * 8):
            data += theirs.recv(100)


# Answers of requests that fail.


@_part
def a_generation_that_is_refused(folder: Path) -> None:
    """Its source is closed."""
    from modulm_server.generation import Running

    closed = 0

    async def source(error: Exception) -> AsyncIterator[Any]:
        nonlocal closed
        try:
            raise error
            yield
        finally:
            closed += 1

    async def main() -> None:
        for error in (RequestError("no", "prompt"), OSError("no")):
            with suppress(RequestError, OSError):
                await Running.start(source(error), _nothing, {})  # type: ignore[arg-type]

    try:
        asyncio.run(main())
    finally:
        assert closed


@_part
def an_isolated_route_that_ends(folder: Path) -> None:
    """And one that answers too late: its process is ended."""
    from modulm_isolation.terms import IsolationError
    from modulm_server.isolated_routes import _Isolated

    ended: list[int] = []
    process = SimpleNamespace(timeout=0.01, end=lambda: ended.append(1))
    remote: Any = SimpleNamespace(remote=SimpleNamespace(process=process, declaration="routes/x"))

    async def main() -> None:
        for is_closed in (True, False):
            reader = asyncio.StreamReader()
            if is_closed:
                reader.feed_eof()
            with suppress(IsolationError):
                await anext(_Isolated._pieces(remote, reader))

    asyncio.run(main())
    assert len(ended) == 2
