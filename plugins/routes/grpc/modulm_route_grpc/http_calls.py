"""Calls of the server's HTTP routes on behalf of gRPC's clients.

A call takes the way of an HTTP request from the outermost layer on, with the client's key, so
that authentication, limits, request ids and metrics are those of HTTP.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import msgspec
from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from starlette.types import ASGIApp, Message

__all__ = ["Call", "CallFailed", "HttpCalls", "client_headers"]

_Result = TypeVar("_Result")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
#: Metadata that become headers of the request.
_HEADERS = frozenset({"authorization", "traceparent", "tracestate", "x-api-key", "x-request-id"})
#: Parts of a response that wait for the client.
_AHEAD = 32
#: Bytes from which messages and bodies are converted in a thread.
_LARGE = 1 << 16


class CallFailed(Exception):
    """A call that ends with an error. details: metadata, such as when to retry."""

    def __init__(
        self, code: grpc.StatusCode, message: str, details: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


@define(eq=False)
class Call:
    """A call of a client. headers: those that its metadata become. size: bytes of its message.
    answer: bytes of the latest JSON that answers it.
    """

    headers: list[tuple[bytes, bytes]]
    size: int
    answer: int = 0

    async def convert(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function that reads the message; in a thread if it is large."""
        return await _converted(self.size, function, *args)

    async def decode(self, body: bytes, read: Callable[[Any], _Result]) -> _Result:
        """What a function makes of JSON that answers the call; in a thread if it is large."""
        self.answer = len(body)
        return await _converted(self.answer, lambda: read(msgspec.json.decode(body)))

    async def encode(self, response: Any) -> bytes:
        """The bytes of a response; made in a thread if the JSON that it is of is large."""
        return await _converted(self.answer, response.SerializeToString)


async def _converted(size: int, function: Callable[..., _Result], *args: Any) -> _Result:
    return function(*args) if size < _LARGE else await asyncio.to_thread(function, *args)


@define(eq=False)
class _Exchange:
    """One request to the application, and its response as it comes."""

    body: bytes
    status: int = 500
    headers: dict[str, str] = field(factory=dict)
    parts: asyncio.Queue[bytes | None] = field(factory=lambda: asyncio.Queue(_AHEAD))
    started: asyncio.Event = field(factory=asyncio.Event)
    gone: asyncio.Event = field(factory=asyncio.Event)
    _sent: bool = False

    async def receive(self) -> Message:
        """Give the body, then the client's disconnect."""
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take a part of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                bytes(name).decode("latin-1").lower(): bytes(value).decode("latin-1")
                for name, value in message["headers"]
            }
            self.started.set()
        elif body := message.get("body"):
            await self.parts.put(bytes(body))

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        """Run the application to its end."""
        try:
            await app(scope, self.receive, self.send)
        finally:
            self.started.set()
            with suppress(asyncio.QueueFull):
                self.parts.put_nowait(None)

    async def pieces(self, task: asyncio.Task[None]) -> AsyncIterator[bytes]:
        """Yield the parts of the response's body."""
        while True:
            if task.done() and self.parts.empty():
                return
            piece = await self.parts.get()
            if piece is None:
                return
            yield piece


@frozen
class HttpCalls:
    """Calls the application that `loopback` calls, as clients from outside do."""

    loopback: Any

    async def call(
        self,
        call: Call,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: str = "",
        request_id: str = "",
        read: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """Call a route; returns what `read` makes of its JSON, or None without one. Raises
        CallFailed.
        """
        async with self._exchange(call, method, path, body, query, request_id) as (exchange, task):
            data = b"".join([piece async for piece in exchange.pieces(task)])
            await task
            _check(exchange, data, path)
            is_json = exchange.headers.get("content-type", "").startswith("application/json")
            return await call.decode(data, read) if data and is_json else None

    async def stream(
        self,
        call: Call,
        path: str,
        body: Mapping[str, Any],
        *,
        request_id: str = "",
        read: Callable[[Any], Any] = lambda event: event,
    ) -> AsyncIterator[Any]:
        """Call a route that answers with a stream of events; yields what `read` makes of their
        JSON. Raises CallFailed.
        """
        async with self._exchange(call, "POST", path, body, "", request_id) as (exchange, task):
            await exchange.started.wait()
            if exchange.status >= 400:
                data = b"".join([piece async for piece in exchange.pieces(task)])
                _check(exchange, data, path)
            rest = b""
            async for piece in exchange.pieces(task):
                *frames, rest = (rest + piece).split(b"\n\n")
                for frame in frames:
                    if frame.startswith(b"data: {"):
                        yield await call.decode(
                            frame[6:], lambda event: read(_checked_event(event))
                        )
            await task

    @asynccontextmanager
    async def _exchange(
        self,
        call: Call,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: str,
        request_id: str,
    ) -> AsyncIterator[tuple[_Exchange, asyncio.Task[None]]]:
        data = b"" if body is None else await call.convert(msgspec.json.encode, body)
        exchange = _Exchange(data)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "2",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": _headers(call, data, request_id),
            "client": None,
            "server": None,
        }
        task = asyncio.ensure_future(exchange.run(self.loopback.app, scope))
        try:
            yield exchange, task
        finally:
            if not task.done():
                exchange.gone.set()
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


def client_headers(context: Any) -> list[tuple[bytes, bytes]]:
    """The headers that a client sent as metadata."""
    return [
        (
            key.lower().encode(),
            value if isinstance(value, bytes) else value.encode("latin-1", "replace"),
        )
        for key, value in context.invocation_metadata() or ()
        if key.lower() in _HEADERS
    ]


def _headers(call: Call, data: bytes, request_id: str) -> list[tuple[bytes, bytes]]:
    """The headers of a request: those that the client sent, and what HTTP needs."""
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
    ]
    headers += [one for one in call.headers if not request_id or one[0] != b"x-request-id"]
    if request_id:
        headers.append((b"x-request-id", request_id.encode("latin-1", "replace")))
    return headers


def _check(exchange: _Exchange, data: bytes, path: str) -> None:
    """Raise CallFailed for the response of an error."""
    if exchange.status < 400:
        return
    retry = exchange.headers.get("retry-after")
    details = () if retry is None else (("retry-after", retry),)
    code = _CODES.get(exchange.status, grpc.StatusCode.INTERNAL)
    message, kind = _message(data)
    if exchange.status == 404 and kind is None:
        code = grpc.StatusCode.UNIMPLEMENTED
        message = f"{path} is not served: this call needs a flag of the server (docs/grpc.md)"
    raise CallFailed(code, message, details)


def _message(data: bytes) -> tuple[str, str | None]:
    """The message and the code of an error's body."""
    try:
        error = msgspec.json.decode(data)["error"]
        return str(error["message"]), error.get("code")
    except (msgspec.DecodeError, KeyError, TypeError):
        return data.decode("utf-8", "replace")[:500] or "the call failed", None


def _checked_event(event: Any) -> Any:
    """Return an event. Raises CallFailed for one that is an error."""
    error = event.get("error") if isinstance(event, dict) else None
    if error is None:
        return event
    unavailable = {"engine_dead", "engine_stalled", "replica_died", "shutting_down"}
    code = grpc.StatusCode.INTERNAL
    if error.get("code") in unavailable:
        code = grpc.StatusCode.UNAVAILABLE
    elif error.get("type") == "invalid_request_error":
        code = grpc.StatusCode.INVALID_ARGUMENT
    raise CallFailed(code, str(error.get("message", "the request failed")))
