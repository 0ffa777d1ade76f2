"""Limits on requests before they are processed.

`RequestGuard` is the outermost layer of the application. It assigns request ids, rejects large or
compressed bodies, starts a few requests at a time, ends transfers with stalled clients, and turns
unhandled exceptions into plain error bodies.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING
from uuid import uuid4

from attrs import define, field, frozen

from modulm_server.errors import ApiError, ClientGone, report, respond
from modulm_server.hosts import HostCheck
from modulm_server.loopback import in_background
from modulm_server.pacing import Answers, Turns
from modulm_server.running_requests import RunningRequests

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestGuard", "RequestLimits", "request_id", "safe_id"]

log = logging.getLogger("modulm_server")

_SAFE_ID = re.compile(r"[^A-Za-z0-9._-]+")
#: Bytes per second of a body below which its client counts as stalled.
_SLOWEST = 1024
#: Health checks, which are never queued.
_AT_ONCE = frozenset({"/health", "/ping", "/ready"})
#: Beginnings of paths whose requests start after others, as the lines of batches do.
_AFTER_OTHERS = ("/v1/files", "/v1/batches")
#: Seconds between two checks for stalled transfers.
_PATROL = 1.0


@frozen(kw_only=True)
class RequestLimits:
    """Maximum counts within a request. The body's size is a flag of the server.

    The limits bound the work per request and are far above what clients send. For limits of
    sampling fields see `modulm_frontend.validation`.
    """

    nodes: int = 1 << 19
    values: int = 1 << 21
    messages: int = 16_384
    prompts: int = 2_048
    n: int = 128
    beams: int = 64
    tools: int = 1_024
    schema_bytes: int = 1 << 20
    schema_depth: int = 64
    metadata: int = 16
    metadata_value: int = 512
    name: int = 256


@define(eq=False)
class _Transfer:
    """A request in progress. waiting_since: set while the server waits for its client."""

    task: asyncio.Task[object] | None
    waiting_since: float | None = None
    stuck: bool = False


@define(eq=False)
class _BodyBytes:
    """Counts the bytes of the bodies of all requests in progress."""

    limit: int
    bytes: int = 0

    def check(self, size: int) -> None:
        """Raise ApiError(503) if `size` more bytes exceed the limit."""
        if self.bytes + size > self.limit:
            raise ApiError(
                503,
                "the server is at its limit of request bytes in progress; try again later",
                code="overloaded",
                headers={"Retry-After": "1", "Connection": "close"},
            )


@define(eq=False)
class _Exchange:
    """One request with its limits and timing.

    Once its body is read, the client is watched: if it disconnects before the response is
    complete, the endpoint is cancelled and `client_left` is set. upload: the body may have any
    size, since its endpoint keeps none of it. begins: called with the response.
    """

    receive: Receive
    send: Send
    transfer: _Transfer
    limit: int
    body_bytes: _BodyBytes
    id_header: bytes | None
    read: int = 0
    counted: int = 0
    complete: bool = False
    upload: bool = False
    begins: Callable[[], None] = lambda: None
    status: int | None = None
    finished: bool = False
    client_left: bool = False
    waited: float = 0.0
    _watcher: asyncio.Task[None] | None = None

    async def take(self) -> Message:
        """Receive more of the body, or the client's disconnect."""
        if self.complete:
            await asyncio.wait({self.watch()})
            return {"type": "http.disconnect"}
        began = time.monotonic()
        # For a slow body, count the time beyond that of the slowest allowed rate as waiting.
        self.transfer.waiting_since = began - max(0.0, self.waited - self.read / _SLOWEST)
        message = await self.receive()
        self.transfer.waiting_since = None
        self.waited += time.monotonic() - began
        if message["type"] == "http.disconnect":
            self.client_left = True
            raise ClientGone
        size = len(message.get("body", b""))
        self.read += size
        if not self.upload:
            self._count(size)
        self.complete = not message.get("more_body", False)
        if self.complete:
            self.watch()
        return message

    def _count(self, size: int) -> None:
        """Count bytes of the body. Raises ApiError beyond the limits."""
        if self.read > self.limit:
            raise _too_large(self.limit)
        self.body_bytes.check(size)
        self.body_bytes.bytes += size
        self.counted += size

    async def give(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.begins()
            if self.id_header is not None:
                message["headers"] = [*message["headers"], (b"x-request-id", self.id_header)]
        elif message["type"] == "http.response.body":
            self.finished = not message.get("more_body", False)
        self.transfer.waiting_since = time.monotonic()
        await self.send(message)
        self.transfer.waiting_since = None

    def watch(self) -> asyncio.Task[None]:
        """Start watching for the client's disconnect, which cancels the endpoint."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._until_gone())
        return self._watcher

    async def _until_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if not self.finished:
            self.client_left = True
            if self.transfer.task is not None:
                self.transfer.task.cancel()

    def close(self) -> None:
        """Stop watching the client."""
        if self._watcher is not None:
            self._watcher.cancel()


@define(eq=False)
class RequestGuard:
    """The outermost layer of the application.

    silence: seconds that a client may neither send nor read. inflight: maximum bytes of all bodies
    in progress. uploads: beginnings of paths whose bodies may have any size.
    """

    app: ASGIApp
    body_limit: int
    silence: float
    header_count: int
    header_bytes: int
    show_id: bool = False
    stacks: bool = False
    hosts: HostCheck = field(factory=HostCheck)
    observe: Callable[[Scope, int, float], None] = lambda scope, status, seconds: None
    socket: Callable[[], AbstractContextManager[None]] = nullcontext
    inflight: int = 256 << 20
    answers: Answers = field(factory=Answers)
    running: RunningRequests = field(factory=RunningRequests)
    uploads: tuple[str, ...] = ()
    _transfers: set[_Transfer] = field(factory=set, init=False)
    _turns: Turns = field(factory=Turns, init=False)
    body_bytes: _BodyBytes = field(init=False)
    _patrol: asyncio.Task[None] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.body_bytes = _BodyBytes(max(self.inflight, self.body_limit))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if await self._welcome(scope, receive, send):
                with self.socket() if scope["type"] == "websocket" else nullcontext():
                    await self.app(scope, receive, send)
            return
        began = time.monotonic()
        name = scope["modulm.id"] = request_id(scope)
        transfer = _Transfer(asyncio.current_task())
        id_header = name.encode() if self.show_id else None
        exchange = _Exchange(
            *(receive, send, transfer, self.body_limit, self.body_bytes, id_header),
            upload=bool(self.uploads) and scope["path"].startswith(self.uploads),
        )
        self._watch(transfer)
        scope["modulm.watch"] = exchange.watch
        try:
            with self.running.track(scope, name):
                await self._answer(scope, exchange)
        except asyncio.CancelledError:
            if transfer.stuck:
                await self._cut_off(scope, exchange)
            elif not exchange.client_left:
                raise
        except ClientGone:
            exchange.client_left = True
        finally:
            exchange.close()
            self.body_bytes.bytes -= exchange.counted
            self._transfers.discard(transfer)
            self.observe(scope, exchange.status or 499, time.monotonic() - began)
        if exchange.client_left:
            log.debug("request %s: the client disconnected", name)

    async def _welcome(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether a WebSocket may be opened. Browsers let any page try, without a preflight."""
        if scope["type"] != "websocket":
            return True
        try:
            self.hosts.check(scope)
        except ApiError:
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return False
        return True

    async def _answer(self, scope: Scope, exchange: _Exchange) -> None:
        try:
            self._check_head(scope, exchange.upload)
            if in_background() or scope["path"].startswith(_AFTER_OTHERS):
                await self.answers.wait()
                await self._turns.wait(_sender(scope))
            elif scope["path"] not in _AT_ONCE:
                exchange.begins = self.answers.expect()
                await self._turns.wait(_sender(scope))
            await self.app(scope, exchange.take, exchange.give)
        except ClientGone:
            raise
        except Exception as error:
            await self._fail(scope, exchange, error)
        finally:
            exchange.begins()

    def _check_head(self, scope: Scope, upload: bool) -> None:
        headers = scope["headers"]
        if len(headers) > self.header_count:
            raise _large_head(f"at most {self.header_count} headers are allowed")
        if sum(len(name) + len(value) + 4 for name, value in headers) > self.header_bytes:
            raise _large_head(f"at most {self.header_bytes} bytes of headers are allowed")
        self.hosts.check(scope)
        for name, value in headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise ApiError(415, "the body must not be compressed")
            if name == b"content-length" and value.isdigit() and not upload:
                if int(value) > self.body_limit:
                    raise _too_large(self.body_limit)
                self.body_bytes.check(int(value))

    async def _fail(self, scope: Scope, exchange: _Exchange, error: Exception) -> None:
        """Respond with an error, or break off a response that has begun."""
        if exchange.status is None:
            api_error = report(error, scope, self.stacks)
            await respond(api_error)(scope, exchange.take, exchange.give)
        elif not exchange.finished:
            raise error

    async def _cut_off(self, scope: Scope, exchange: _Exchange) -> None:
        """Disconnect a stalled client, with a 408 if the response has not begun."""
        log.info("request %s: the client stalled", scope["modulm.id"])
        if exchange.status is None:
            timeout_error = ApiError(408, "the request was not received in time")
            timeout_error.headers["Connection"] = "close"
            with suppress(Exception):
                await asyncio.wait_for(
                    respond(timeout_error)(scope, exchange.receive, exchange.give), _PATROL
                )

    def _watch(self, transfer: _Transfer) -> None:
        self._transfers.add(transfer)
        if self.silence > 0 and (self._patrol is None or self._patrol.done()):
            self._patrol = asyncio.get_running_loop().create_task(self._walk())

    async def _walk(self) -> None:
        """While there are transfers, cancel those whose client has stalled for too long."""
        while self._transfers:
            await asyncio.sleep(min(_PATROL, self.silence / 4))
            latest = time.monotonic() - self.silence
            for transfer in list(self._transfers):
                since = transfer.waiting_since
                if since is not None and since < latest and not transfer.stuck:
                    transfer.stuck = True
                    if transfer.task is not None:
                        transfer.task.cancel()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes", headers={"Connection": "close"})


def _large_head(message: str) -> ApiError:
    return ApiError(431, message, headers={"Connection": "close"})


def _sender(scope: Scope) -> object:
    """Whose requests start in turn with those of others: a key, which is not checked yet."""
    for name, value in scope["headers"]:
        if name in (b"authorization", b"x-api-key"):
            return bytes(value)
    return scope.get("modulm.owner")


def request_id(scope: Scope) -> str:
    """The sanitized X-Request-Id of the client, or a new id.

    It helps people to find a request in the logs; the server uses it for nothing else.
    """
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return safe_id(bytes(value[:256]).decode("latin-1")) or uuid4().hex
    return uuid4().hex


def safe_id(text: str) -> str:
    """Remove characters from a client's id that are unsafe in logs or headers."""
    return _SAFE_ID.sub("", text[:256])[:128]
