"""What reaches the awaits, socket and file operations of a server's parts that no request reaches.

Each raises what its callers handle, or gives the right result.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID
from fastapi import APIRouter
from fault_parts import FIRED, PARTS, Part
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from modulm.config import EngineConfig
from modulm_distributed.tls import TlsSession, tls_contexts
from modulm_fleet.secret import read_secret
from modulm_isolation.needs import Needs
from modulm_isolation.process import IsolatedProcess
from modulm_isolation.terms import IsolationError, Limits
from modulm_memory.fitting import stored_bytes
from modulm_route_files import batch as batches
from modulm_route_files import batch_store
from modulm_route_files.batch import Batch
from modulm_route_files.batch_store import BatchStore
from modulm_route_files.slots import Slots
from modulm_route_files.store import FileStore
from modulm_route_grpc import descriptors, intake
from modulm_route_grpc import server as grpc_server
from modulm_server import headless, isolated_routes, json_body, logs, request_guard, serve
from modulm_server.api_keys import read_keys
from modulm_server.api_workers import Workers
from modulm_server.auth import LOOPBACK, _Guard
from modulm_server.engine import adapters, heartbeat, replica_processes, spawn
from modulm_server.engine.shared_experts import SharedExperts
from modulm_server.flags import ServerConfig
from modulm_server.key_limits import Usages
from modulm_server.models import request_fields
from modulm_server.models.library import ModelLibrary
from modulm_server.output import Outlet, _unblock_pipe, forward
from modulm_server.pacing import FairSemaphore
from modulm_server.route import RouteContext, RouteFamily
from modulm_server.sse import EventStream

START = subprocess.Popen


def _part(run: Part) -> Part:
    PARTS[run.__name__.replace("_", " ")] = run
    return run


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


async def _send(message: Any) -> None:
    await asyncio.sleep(0)


async def _never() -> Any:
    await asyncio.Event().wait()


async def _gone() -> Any:
    return {"type": "http.disconnect"}


# Streams and bodies.


def _stream(receive: Callable[[], Awaitable[Any]], count: int) -> None:
    """An event stream without a `RequestGuard`, which closes its generator in any case."""
    open_streams = 0

    async def frames() -> AsyncIterator[bytes]:
        nonlocal open_streams
        open_streams += 1
        try:
            for _ in range(count):
                yield b"data: 1\n\n"
                await asyncio.sleep(0)
        finally:
            open_streams -= 1

    async def main() -> None:
        await EventStream(frames())({}, receive, _send)  # type: ignore[arg-type]

    try:
        asyncio.run(main())
    finally:
        assert not open_streams


@_part
def a_stream_of_events(folder: Path) -> None:
    _stream(_never, 3)


@_part
def a_stream_whose_client_leaves(folder: Path) -> None:
    _stream(_gone, 1 << 30)


@_part
def a_stream_whose_head_cannot_be_sent(folder: Path) -> None:
    async def refuse(message: Any) -> None:
        raise BrokenPipeError

    async def frames() -> AsyncIterator[bytes]:
        yield b""

    async def main() -> None:
        with suppress(BrokenPipeError):
            await EventStream(frames())({}, _never, refuse)  # type: ignore[arg-type]

    asyncio.run(main())


@_part
def a_body_that_stalls(folder: Path) -> None:
    """It gets a 408 within a second, or its connection is closed: at the latest when another comes,
    which starts a patrol that has ended.
    """

    async def read(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def main() -> list[int]:
        statuses = []

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        guard = request_guard.RequestGuard(read, 1 << 20, 0.02, 100, 1 << 16)
        scope = {"type": "http", "headers": [], "path": "/health", "method": "POST"}
        async with asyncio.timeout(300):
            first = asyncio.ensure_future(guard(scope, _never, send))
            await asyncio.wait([first], timeout=0.2)
            await asyncio.gather(first, guard({**scope}, _never, send), return_exceptions=True)
        return statuses

    asyncio.run(main())


@_part
def a_large_body(folder: Path) -> None:
    """In many parts, as a front end of several models and a route read it."""
    text = json.dumps({"a": "x" * (1 << 17)}).encode()

    def receive() -> Callable[[], Awaitable[Any]]:
        parts = [text[: 1 << 16], text[1 << 16 :]]

        async def take() -> Any:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        return take

    async def main() -> None:
        assert await request_fields.read_body(receive()) == text
        request = Request({"type": "http", "headers": []}, receive())
        assert await json_body.body_of(request) == text == await request.body()
        assert (await json_body.read_object(text))["a"]
        replay = request_fields.Replay(text, _gone)
        assert (await replay())["body"] == text
        assert (await replay())["type"] == "http.disconnect"
        form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nM\r\n--x--\r\n'
        head = {"headers": [(b"content-type", b"multipart/form-data; boundary=x")]}
        fields = await request_fields.read_fields(head, form)
        assert fields is not None
        assert fields.model == "M"

    asyncio.run(main())


@_part
def a_guard_of_keys(folder: Path) -> None:
    """A key beyond its rate, and a batch whose key is gone."""
    file = folder / "keys"
    file.write_text("keys:\n- name: ann\n  key: secret-of-ann\n  requests_per_minute: 1\n")
    file.chmod(0o600)
    flags = EngineConfig.from_keywords(api_keys_file=str(file)).group(ServerConfig)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def main() -> list[int]:
        statuses = []

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.append(message["status"])

        guard = _Guard(app, read_keys(flags), Usages())
        scope = {"type": "http", "method": "POST", "path": "/"}
        headers = [(b"authorization", b"Bearer secret-of-ann")]
        for _ in range(2):
            await guard({**scope, "headers": headers}, _never, send)
        batch = {**scope, "headers": [], "modulm.loopback": LOOPBACK, "modulm.owner": "bob"}
        await guard(batch, _never, send)
        return statuses

    assert asyncio.run(main()) == [200, 429, 200]


# Sockets, processes and files of a server.


@_part
def a_unix_socket(folder: Path) -> None:
    """Also where a server that was killed has left one."""
    flags = EngineConfig.from_keywords(uds=str(folder / "socket")).group(ServerConfig)
    for _ in range(2):
        serve.open_socket(flags).close()


@_part
def standard_output(folder: Path) -> None:
    """An outlet drops what cannot be written; a child's output ends with it."""
    reader, writer = os.pipe()
    try:
        outlet = Outlet.__new__(Outlet)
        outlet._descriptor, outlet._moved, outlet.dropped, outlet._unreported = writer, 0, 0, 0
        outlet._write(b"a line\n")
        assert outlet.dropped or os.read(reader, 100) == b"a line\n"
        _unblock_pipe(writer)
    finally:
        os.close(writer)
        thread = forward(os.fdopen(reader, "rb"))
        thread.join(300)
        assert not thread.is_alive()


@_part
def models_in_a_folder(folder: Path) -> None:
    """Nothing half-written is left, and a model that cannot be replaced stays."""
    library = ModelLibrary(folder / "models")
    for inner in ("one", "owner/two", "models--a--b/snapshots/1"):
        (library.folder / inner).mkdir(parents=True)
        (library.folder / inner / "config.json").write_text("{}")
    (library.folder / "models--a--b/refs").mkdir()
    (library.folder / "models--a--b/refs/main").write_text("1")
    (library.folder / "four.gguf").write_bytes(b"x")
    (library.folder / "five").symlink_to(library.folder / "one")
    names = {"one", "owner/two", "a/b", "four", "five"}
    try:
        assert {name for name, _ in library.models()} == names
        for source in ("one", "four", "new/three"):
            library.add("new/three", {"seed": 1}, partial(library.copy_files, source))
            names.add("new/three")
        library.copy_files("new/three", folder)
        for name in ("owner/two", "five"):
            library.remove(name)
            names.remove(name)
    finally:
        assert names - {"owner/two", "five"} <= {name for name, _ in library._paths()}
        assert not list(library.folder.glob(".new-*"))
    set_aside = library._set_aside

    def lose_the_new_one(path: Path) -> Path:
        for new in library.folder.glob(".new-*"):
            shutil.rmtree(new)
        return set_aside(path)

    with _replaced(library, "_set_aside", lose_the_new_one), suppress(FileNotFoundError):
        library.add("new/three", {"seed": 2}, lambda new: None)
    assert FIRED[0]() or library.settings("new/three") == {"seed": 1}


@_part
def files_that_a_start_reads(folder: Path) -> None:
    (folder / "log.json").write_text("{}")
    logs._read(str(folder / "log.json"))
    (folder / "one").mkdir()
    (folder / "one" / "model.safetensors").write_bytes(b"weights")
    assert stored_bytes(folder) == 7
    file = str(folder / "log.json")
    serve._Certificates(None, file, file).refresh()
    watched = SimpleNamespace(dump_dir=str(folder / "stacks"))
    config: Any = SimpleNamespace(group=lambda kind: watched)
    heartbeat.stacks_file(config).close()
    (folder / "adapter_config.json").write_text("{}")
    adapters._stamp(folder)
    shared = SharedExperts()
    shared.create_folder()
    shared.close()


class Sleeper:
    """Starts processes that only sleep, instead of engines and servers."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, command: Any, **options: Any) -> subprocess.Popen[bytes]:
        self.processes.append(START(["sleep", "600"], **options))
        return self.processes[-1]

    @contextmanager
    def started(self) -> Iterator[None]:
        """At the end none of them runs."""
        try:
            with _replaced(subprocess, "Popen", self):
                yield
        finally:
            running = [one for one in self.processes if one.poll() is None]
            for one in running:
                one.kill()
                one.wait()
            assert not running, "a process was left"


@_part
def an_engines_process(folder: Path) -> None:
    """No process, folder or socket is left. It is reached over its local socket."""
    with _replaced(spawn.tempfile, "tempdir", str(folder)):
        try:
            with Sleeper().started():
                engine = spawn.EngineProcess()
                try:
                    spawn.connect(engine.address).socket.close()
                finally:
                    engine.close()
                spawn.EngineProcess(engine.address).close()
            with suppress(OSError):  # the name of the socket is too long
                spawn._listening(f"{folder}/{'x' * 120}/engine")
        finally:
            left = [one.name for one in folder.iterdir()]
            assert not left


@_part
def an_engine_on_tcp(folder: Path) -> None:
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    contexts = tls_contexts(read_secret(str(secret)))
    placed: Any = SimpleNamespace(here=range(1), address=("127.0.0.1", _free_port() - 1))
    for one in replica_processes.listening(placed, "127.0.0.1"):
        one.close()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(300)
        with Sleeper().started():
            spawn.EngineProcess(listener=listener, secret_file=str(secret)).close()

        def greet() -> None:
            peer, _ = listener.accept()
            with peer, suppress(OSError):
                TlsSession(contexts, server=True).handshake(peer)

        answer = pool.submit(greet)
        try:
            spawn.connect(spawn.address_of(listener), str(secret)).socket.close()
        finally:
            socket.create_connection(listener.getsockname()).close()
            answer.result(300)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@_part
def further_server_processes(folder: Path) -> None:
    with Sleeper().started(), socket.create_server(("127.0.0.1", 0)) as listener:
        workers = Workers(1, listener, "/no/engine", 0.0)
        for process in workers._processes:
            process.kill()  # one that sleeps does not end by itself
            process.wait()
        workers.end()


@_part
def a_machine_without_a_front_end(folder: Path) -> None:
    """It announces its replicas again when the front end has gone."""
    ending = threading.Event()
    ours, theirs = socket.socketpair()
    theirs.close()

    def announce(*_: Any) -> socket.socket:
        ending.set()
        return ours

    with _replaced(headless, "announce", announce):
        headless._keep(ours, ending, None, None, None)  # type: ignore[arg-type]
    assert ours.fileno() < 0


# Stored files and batches.


def _stores(folder: Path) -> tuple[FileStore, BatchStore]:
    files = FileStore(folder, 9, 1 << 20, lasting=True)
    return files, BatchStore(files)


@_part
def files_of_a_server_that_died(folder: Path) -> None:
    """What it left is removed, and what it stored is read."""
    files, _ = _stores(folder / "x")
    file = files.make("me", "name", "user_data")
    files.write(file, io.BytesIO(b"content"))
    left = [file.path.with_name(name) for name in ("file-half", "a.new", "file-gone.json")]
    for path in left:
        path.write_bytes(b"half")
    again, _ = _stores(folder / "x")
    again.remove_leftovers()
    found = again.find(file.id)
    if found is None:
        raise OSError("its card cannot be read")
    assert found.path.read_bytes() == b"content"
    assert again.find("file-gone") is None


@_part
def temporary_files(folder: Path) -> None:
    with _replaced(spawn.tempfile, "tempdir", str(folder)):
        files = FileStore(None, 9, 1 << 20, lasting=False)
        try:
            assert files.folder.exists()
        finally:
            files.close()
        assert not list(folder.iterdir())


@_part
def a_batch_of_another_server(folder: Path) -> None:
    """It is read, cancelled by a file, and forgotten when there are too many."""
    files, store = _stores(folder)
    batch = Batch("me", batches.ENDPOINTS[0], "24h", "file-x")
    path = files.folder / "batches" / f"{batch.id}.json"
    path.write_bytes(json.dumps(batch.table()).encode())
    found = store.get(batch.id)
    if found is None:
        raise OSError("it cannot be read")
    with _replaced(batch_store, "_CHECK_INTERVAL", 0.01):

        async def endless(one: Batch) -> None:
            await asyncio.Event().wait()

        async def main() -> None:
            other = _stores(folder)[1]
            store.start(found, endless)
            running = store._running[found.id][1]
            await other.cancel(other.get(found.id) or found)
            with suppress(asyncio.CancelledError):
                async with asyncio.timeout(300):
                    await running
            await asyncio.gather(*store._cleanups)

        asyncio.run(main())
    assert found.status in ("cancelled", "failed")
    assert FIRED[0]() or not list(path.parent.glob("*.lock"))
    store.remove_leftovers()
    assert not list(path.parent.glob("*.lock"))
    with _replaced(batch_store, "_MAX_BATCHES", 0):
        store._forget_old()
    assert not path.exists()


@_part
def a_batch_that_cannot_be_saved(folder: Path) -> None:
    """It is refused, and does not run later."""
    files, store = _stores(folder)
    batch = Batch("me", batches.ENDPOINTS[0], "24h", "file-x")

    def fail(*_: Any) -> None:
        raise OSError("full")

    with _replaced(batch_store, "write_atomically", fail), suppress(OSError):
        store.start(batch, lambda one: asyncio.sleep(0))
    assert not list((files.folder / "batches").iterdir())


class HalfFull(io.BytesIO):
    """A file that takes a part of the second record, and then no more."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 8

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = super().write(bytes(data)[: self.room])
        self.room -= written
        return written


@_part
def a_record_that_has_no_room(folder: Path) -> None:
    target = HalfFull()
    batches._append(target, b"one\n")  # type: ignore[arg-type]
    with suppress(OSError):
        batches._append(target, b"another\n")  # type: ignore[arg-type]
    if target.getvalue() != b"one\n":
        raise OSError("the rest is cut off when the batch continues")


@_part
def texts_that_wait(folder: Path) -> None:
    """For a thread; one that is cancelled has taken none."""

    async def main() -> None:
        free = FairSemaphore(1)
        await free.acquire("a")
        try:
            waiting = asyncio.ensure_future(free.acquire("b"))
            await asyncio.sleep(0)
        finally:
            free.release()
        try:
            async with asyncio.timeout(300):
                await waiting
            free.release()
        finally:
            assert not free._used

    asyncio.run(main())


@_part
def lines_that_wait(folder: Path) -> None:
    """For a slot, for room in a full server, and for the disk although they are cancelled."""

    async def main() -> None:
        slots = Slots(lambda: True)
        for _ in range(8):
            await slots.acquire(1)
        waiting = asyncio.ensure_future(slots.acquire(1))
        await asyncio.sleep(0)
        slots.release(1)
        async with asyncio.timeout(300):
            await waiting

        async def full(*_: Any) -> tuple[int, bytes]:
            return 429, b""

        batch = Batch("me", batches.ENDPOINTS[0], "24h", "file-x")
        with _replaced(batches, "_PAUSES", (0.0, 0.0)):
            answer = await batch._post(SimpleNamespace(post=full), b"{}")  # type: ignore[arg-type]
        assert answer == (429, b"")
        target, entered = io.BytesIO(), threading.Event()

        def append(*arguments: Any) -> None:
            entered.set()
            threading.Event().wait(0.02)
            original(*arguments)

        original = batches._append
        with _replaced(batches, "_append", append):
            record = {"id": "1", "response": None}
            writing = asyncio.ensure_future(batch._write(target, record))  # type: ignore[arg-type]
            await asyncio.to_thread(entered.wait, 30)
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing
        if batch.counts["failed"] != 1:
            raise OSError("it was not written")

    asyncio.run(main())


# Routes of packages in processes of their own.


class Mine(RouteFamily):
    """Answers in pieces with what it was sent."""

    name = "mine"
    api = 2

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/mine", self.answer, methods=["POST"], response_model=None)
        return router

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        return StreamingResponse(iter([body, b"b"]), 201)


class Remote(IsolatedProcess):
    """A process that is this one."""

    pid = os.getpid()  # type: ignore[assignment]

    def __init__(self, peer: socket.socket) -> None:
        super().__init__("mine", Limits(20.0), Needs())
        self._requests, self.generation = peer, 1


@_part
def an_isolated_route(folder: Path) -> None:
    """Both sides of the connection, in one process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = isolated_routes.RouteServer(SimpleNamespace(requests=theirs))  # type: ignore[arg-type]
    process = Remote(ours)

    def call(method: str, *arguments: Any) -> Any:
        return getattr(server, method)(f"{__name__}:Mine", *arguments)

    remote = SimpleNamespace(call=call, process=process, declaration="routes/mine")
    family = type("Mine", (isolated_routes._Isolated,), {"remote": remote, "name": "mine"})
    nothing: dict[str, Any] = dict.fromkeys(("engine", "generation", "registry", "loopback"))
    context = RouteContext(config=EngineConfig(), models=("M",), created=0, **nothing)
    scope = {"type": "http", "method": "POST", "path": "/mine", "query_string": b"", "headers": []}

    async def receive() -> Any:
        return {"type": "http.request", "body": b"a", "more_body": False}

    async def main() -> bytes:
        pieces = []

        async def send(message: Any) -> None:
            pieces.append(message.get("body", b""))

        async with asyncio.timeout(300):
            stand_in = family(context)
            stand_in.router()
            await stand_in.start()
            try:
                answer = await stand_in._forward(Request(scope, receive))
                await answer({**scope, "asgi": {"spec_version": "2.4"}}, _never, send)
            finally:
                await stand_in.stop()
        return b"".join(pieces)

    try:
        assert asyncio.run(main()) == b"ab"
    except IsolationError as error:
        raise OSError(str(error)) from error
    finally:
        server._loop.call_soon_threadsafe(server._loop.stop)
        while server._loop.is_running():
            threading.Event().wait(0.001)
        server._loop.close()
        process.close()
        for one in (ours, theirs):
            one.close()


# gRPC.


@_part
def protos_of_grpc(folder: Path) -> None:
    descriptors._load()


def _certificate(folder: Path) -> tuple[str, str]:
    """Files of a key and of its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "key.pem", folder / "certificate.pem"
    files[0].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    files[1].write_bytes(certificate.public_bytes(Encoding.PEM))
    return str(files[0]), str(files[1])


@_part
def a_message_of_a_call_that_is_cancelled(folder: Path) -> None:
    """It is sent to its end."""
    sent = []

    async def write() -> None:
        await asyncio.sleep(0.01)
        sent.append(1)

    async def main() -> BaseException:
        sending = asyncio.ensure_future(intake._whole(write()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sending.cancel()
        (ended,) = await asyncio.gather(sending, return_exceptions=True)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})  # type: ignore[arg-type]
        assert sent
        return ended

    assert isinstance(asyncio.run(main()), (OSError, asyncio.CancelledError))


@_part
def a_grpc_server_with_certificates(folder: Path) -> None:
    """It looks at its engine again and again, until it is stopped."""
    key, certificate = _certificate(folder)
    config = EngineConfig.from_keywords(
        model="M", ssl_keyfile=key, ssl_certfile=certificate, ssl_ca_certs=certificate
    )
    looks: list[int] = []

    async def check_health() -> None:
        looks.append(1)
        await asyncio.sleep(0)

    info = SimpleNamespace(eos=(), max_model_len=64)
    engine: Any = SimpleNamespace(info=info, check_health=check_health)
    nothing: dict[str, Any] = dict.fromkeys(("generation", "registry", "loopback"))
    context = RouteContext(engine=engine, config=config, models=("M",), created=0, **nothing)

    async def main() -> None:
        server = grpc_server.GrpcServer(context, ("127.0.0.1", 0))
        try:
            async with asyncio.timeout(300):
                await server.start()
                watch = server._watch
                while len(looks) < 3 and watch is not None and not watch.done():
                    await asyncio.sleep(0.001)
        finally:
            await server.stop()

    with _replaced(grpc_server, "_LOOK", 0.001):
        asyncio.run(main())
