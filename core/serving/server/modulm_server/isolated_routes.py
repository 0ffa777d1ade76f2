"""Route families in another process: the stand-in here, and the class that serves them there.

A request is sent as an ASGI scope and its body over a connection of its own, so that requests run
side by side and answers may be streams. Such a family has no engine: its context has the
configuration and the names of the models, and everything else of it is refused.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import finalize

from fastapi import APIRouter, FastAPI
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from modulm.errors import ModulmError, PluginBroken, UnsupportedError
from modulm_isolation.channel import LIMIT, Closed
from modulm_isolation.child import Questions, resolve
from modulm_isolation.process import IsolatedDriver, driver_of
from modulm_isolation.terms import IsolationError
from modulm_server.errors import exception_handler
from modulm_server.json_body import body_of
from modulm_server.route import RouteContext, RouteFamily
from modulm_wire.frames import pack_config, unpack_config
from modulm_wire.packing import decode, encode

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from modulm.plugins.declaration import Declaration

__all__ = ["RouteServer", "stand_in"]

#: Bytes of a body in one message.
_PIECE = 1 << 20
_SCOPE = ("method", "path", "query_string", "root_path", "scheme", "http_version", "headers")
_numbers = count()


async def _read(reader: asyncio.StreamReader) -> Any:
    """Read a message. Raises Closed."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > LIMIT:
            raise Closed
        return decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise Closed from error


async def _write(writer: asyncio.StreamWriter, *message: Any) -> None:
    body = encode(message)
    try:
        writer.write(len(body).to_bytes(4, "big") + body)
        await writer.drain()
    except OSError as error:
        raise Closed from error


class _Isolated(RouteFamily):
    """The stand-in of a family. `remote` and `facts` are set by `stand_in`."""

    remote: IsolatedDriver
    facts: Mapping[str, Any]

    def __init__(self, context: RouteContext) -> None:
        super().__init__(context)
        self._number = next(_numbers)
        config = pack_config(context.config)
        self._arguments = config, list(context.models), context.created, context.front
        self._started = False
        self._lock = threading.Lock()
        self._open()
        finalize(self, self.remote.process.forget, self._number)

    def _open(self) -> None:
        self.remote.call("open", self._number, *self._arguments)
        self._generation = self.remote.process.generation
        if self._started:
            self.remote.call("start", self._number)

    def _current(self) -> None:
        """Make the family again if its process has ended."""
        process = self.remote.process
        with self._lock:
            if process.pid is None or process.generation != self._generation:
                self._open()

    def absent(self) -> str | None:
        """Why the family is not served, or None."""
        reason: str | None = self.remote.call("absent", self._number)
        return reason

    def router(self) -> APIRouter:
        """Build routes that forward to those of the process."""
        router = APIRouter()
        for path, methods in self.remote.call("routes", self._number):
            router.add_api_route(
                path, self._forward, methods=methods, response_model=None, include_in_schema=False
            )
        return router

    async def start(self) -> None:
        """Start the family's background work."""
        self._started = True
        await asyncio.to_thread(self.remote.call, "start", self._number)

    async def stop(self) -> None:
        """Stop the family's background work."""
        self._started = False
        if self.remote.process.generation == self._generation:
            with suppress(PluginBroken):
                await asyncio.to_thread(self.remote.call, "stop", self._number)

    def _connect(self) -> socket.socket:
        self._current()
        return self.remote.process.connect()

    async def _forward(self, request: Request) -> Response:
        """Answer a request with what the process answers.

        Raises IsolationError if it ends, or does not answer within the time limit.
        """
        body = await body_of(request)
        connection = await asyncio.to_thread(self._connect)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        pieces = self._pieces(reader)
        try:
            scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
            scope["client"] = request.scope.get("client")
            with suppress(Closed):  # if the process has ended, reading says so
                await _write(writer, self._number, scope, len(body))
                for start in range(0, len(body), _PIECE):
                    await _write(writer, body[start : start + _PIECE])
            status, headers = await anext(pieces)
        except BaseException:
            writer.close()
            raise
        close = BackgroundTask(_close, writer)
        response = StreamingResponse(_closing(pieces, writer), status, background=close)
        response.raw_headers = [(name, value) for name, value in headers]
        return response

    async def _pieces(self, reader: asyncio.StreamReader) -> AsyncIterator[Any]:
        """Yield status and headers, and then the body's pieces."""
        process = self.remote.process
        while True:
            try:
                async with asyncio.timeout(process.timeout):
                    message = await _read(reader)
            except TimeoutError:
                await asyncio.to_thread(process.end)
                raise IsolationError(
                    f"{self.remote.declaration} took more than {process.timeout:g} s; its process "
                    "was ended and is started again"
                ) from None
            except Closed:
                await asyncio.to_thread(process.end)
                raise IsolationError(
                    f"{self.remote.declaration}: its process ended and is started again"
                ) from None
            if not message:
                return
            yield message if len(message) == 2 else message[0]


async def _closing(pieces: AsyncIterator[Any], writer: asyncio.StreamWriter) -> AsyncIterator[Any]:
    """Yield the pieces; the connection is closed however this ends."""
    try:
        async for piece in pieces:
            yield piece
    finally:
        writer.close()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def stand_in(declaration: Declaration, term: str) -> type[RouteFamily]:
    """Return the class that stands for a route family. Raises PluginBroken."""
    remote = driver_of(declaration, term, "modulm_server.isolated_routes:RouteServer")
    facts = remote.call("describe")
    api = facts["api"]
    members = {
        "remote": remote,
        "facts": facts,
        "name": facts["name"],
        "api": tuple(api) if isinstance(api, list) else api,
        "shared_paths": tuple(facts["shared_paths"]),
        "cold_paths": tuple(facts["cold_paths"]),
        # whose routes they are is decided by the module's name
        "__module__": declaration.target.partition(":")[0],
    }
    return type(facts["class"], (_Isolated,), members)


class _Absent:
    """A part of the context that an isolated family does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise UnsupportedError(
            f"a route family that --isolate runs in another process has no context.{self._name}"
        )


class RouteServer:
    """Serves route families, by number, in the isolated process."""

    def __init__(self, questions: Questions) -> None:
        self._requests = questions.requests
        self._families: dict[int, RouteFamily] = {}
        self._apps: dict[int, FastAPI] = {}
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._loop.add_reader(self._requests.fileno(), self._accept)
        self._loop.run_forever()

    def _accept(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._requests, 16, 1)
        if not data:
            self._loop.remove_reader(self._requests.fileno())
        for descriptor in descriptors:
            try:
                connection = socket.socket(fileno=descriptor)
            except OSError:  # its client is told by the end of the connection
                os.close(descriptor)
                continue
            task = self._loop.create_task(self._answer(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def describe(self, target: str) -> dict[str, Any]:
        """What the class says of itself."""
        cls = resolve(target)
        return {
            "class": cls.__name__,
            "name": cls.name,
            "api": getattr(cls, "api", None),
            "shared_paths": list(cls.shared_paths),
            "cold_paths": list(cls.cold_paths),
        }

    def open(
        self, target: str, number: int, config: Any, models: Any, created: int, front: bool
    ) -> None:
        """Create a family and the application of its routes."""
        unavailable: dict[str, Any] = {
            name: _Absent(name) for name in ("engine", "generation", "registry", "loopback")
        }
        context = RouteContext(
            config=unpack_config(config),
            models=tuple(models),
            created=created,
            front=front,
            **unavailable,
        )
        family = resolve(target)(context)
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        for kind in (ModulmError, Exception):
            app.add_exception_handler(kind, exception_handler(stacks=False))
        app.add_middleware(_NoExit)
        app.router.routes.extend(family.router().routes)
        self._families[number], self._apps[number] = family, app

    def absent(self, target: str, number: int) -> str | None:
        """Why the family is not served, or None."""
        return self._families[number].absent()

    def routes(self, target: str, number: int) -> list[Any]:
        """Paths and methods. Raises UnsupportedError for WebSockets and mounted applications."""
        routes = self._apps[number].router.routes
        for route in routes:
            if not isinstance(route, Route):
                raise UnsupportedError(
                    f"{type(route).__name__} {getattr(route, 'path', '')} cannot be isolated: "
                    "only HTTP routes can"
                )
        return [[route.path, sorted(route.methods or ())] for route in routes]  # type: ignore[attr-defined]

    def start(self, target: str, number: int) -> None:
        """Start the family's background work."""
        asyncio.run_coroutine_threadsafe(self._families[number].start(), self._loop).result()

    def stop(self, target: str, number: int) -> None:
        """Stop the family's background work."""
        asyncio.run_coroutine_threadsafe(self._families[number].stop(), self._loop).result()

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop families whose stand-ins are gone."""
        for number in numbers:
            self._families.pop(number, None)
            self._apps.pop(number, None)

    async def _answer(self, connection: socket.socket) -> None:
        """Answer one request."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            number, scope, size = await _read(reader)
            body = bytearray()
            while len(body) < size:
                body += (await _read(reader))[0]
            scope |= {"type": "http", "asgi": {"version": "3.0"}, "extensions": {}}
            scope["headers"] = [(name, value) for name, value in scope["headers"]]
            exchange = _Exchange(bytes(body), reader, writer)
            with suppress(Exception):  # the handler has answered, and written it to the log
                await self._apps[number](scope, exchange.receive, exchange.send)
        except Closed:
            return
        finally:
            writer.close()


class _NoExit:
    """Makes `sys.exit` in a route a failure of its request; it would end the event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except SystemExit as error:
            raise RuntimeError(f"SystemExit: {error}") from error


class _Exchange:
    """The two functions of an ASGI application's call."""

    def __init__(
        self, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._body: bytes | None = body
        self._reader = reader
        self._writer = writer

    async def receive(self) -> dict[str, Any]:
        """Return the body, and then the client's disconnect when it comes."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._reader.read(1)
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send the start or a piece of the response."""
        if message["type"] == "http.response.start":
            headers = [list(header) for header in message.get("headers", ())]
            await _write(self._writer, message["status"], headers)
            return
        body = message.get("body", b"")
        for start in range(0, len(body), _PIECE):
            await _write(self._writer, body[start : start + _PIECE])
        if not message.get("more_body", False):
            await _write(self._writer)
