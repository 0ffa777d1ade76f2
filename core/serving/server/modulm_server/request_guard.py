"""What a request may cost before anything is done for it.

`RequestGuard` is the outermost layer of the application: it gives each request an id, refuses what
is too large or encoded, lets a few begin at a time, ends transfers with clients that have gone
silent, and turns every exception that nothing else answers into a plain error body.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import uuid4

from attrs import define, field, frozen

from modulm_server.errors import ApiError, ClientGone, report, respond
from modulm_server.hosts import HostCheck
from modulm_server.pacing import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestGuard", "RequestLimits", "request_id", "safe_id"]

log = logging.getLogger("modulm_server")

_SAFE_ID = re.compile(r"[^A-Za-z0-9._-]+")
#: Bytes per second of a body below which its client counts as silent.
_SLOWEST = 1024
#: Signs of life, which wait for nobody.
_AT_ONCE = frozenset({"/health", "/ping", "/ready"})
#: Seconds between two looks at transfers that may be stuck.
_PATROL = 1.0


@frozen(kw_only=True)
class RequestLimits:
    """Counts that a request may not exceed; bytes of the whole body are a flag of the server.

    They bound work per request, not what is useful: each is far above what clients send. Those of
    sampling fields are in `modulm.engine.sampling.validation`.
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
    """A request in progress; `waiting_since` is set while we wait for its client."""

    task: asyncio.Task[object] | None
    waiting_since: float | None = None
    stuck: bool = False


@define(eq=False)
class _Held:
    """Bytes in the bodies of all requests that are being answered."""

    limit: int
    bytes: int = 0

    def check(self, size: int) -> None:
        """Raise ApiError(503) if so much more is too much for now."""
        if self.bytes + size > self.limit:
            raise ApiError(
                503,
                "the server holds as many bytes of requests as it may; try again later",
                code="overloaded",
                headers={"Retry-After": "1", "Connection": "close"},
            )


@define(eq=False)
class _Exchange:
    """One request, counted and timed.

    Once its body is read, somebody watches the client: if it leaves before the answer is complete,
    the endpoint is cancelled, and `gone` says why.
    """

    receive: Receive
    send: Send
    transfer: _Transfer
    limit: int
    held: _Held
    id_header: bytes | None
    read: int = 0
    counted: int = 0
    complete: bool = False
    status: int | None = None
    finished: bool = False
    gone: bool = False
    waited: float = 0.0
    _watcher: asyncio.Task[None] | None = None

    async def take(self) -> Message:
        """More of the body, or the news that the client is gone."""
        if self.complete:
            await asyncio.wait({self.watch()})
            return {"type": "http.disconnect"}
        began = time.monotonic()
        # A body in drops has waited all the time that its bytes do not account for.
        self.transfer.waiting_since = began - max(0.0, self.waited - self.read / _SLOWEST)
        message = await self.receive()
        self.transfer.waiting_since = None
        self.waited += time.monotonic() - began
        if message["type"] == "http.disconnect":
            self.gone = True
            raise ClientGone
        size = len(message.get("body", b""))
        self.read += size
        if self.read > self.limit:
            raise _too_large(self.limit)
        self.held.check(size)
        self.held.bytes += size
        self.counted += size
        self.complete = not message.get("more_body", False)
        if self.complete:
            self.watch()
        return message

    async def give(self, message: Message) -> None:
        """A part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.id_header is not None:
                message["headers"] = [*message["headers"], (b"x-request-id", self.id_header)]
        elif message["type"] == "http.response.body":
            self.finished = not message.get("more_body", False)
        self.transfer.waiting_since = time.monotonic()
        await self.send(message)
        self.transfer.waiting_since = None

    def watch(self) -> asyncio.Task[None]:
        """Cancel the endpoint when the client leaves; what is left of the body is dropped."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._until_gone())
        return self._watcher

    async def _until_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if not self.finished:
            self.gone = True
            if self.transfer.task is not None:
                self.transfer.task.cancel()

    def close(self) -> None:
        """The request is over."""
        if self._watcher is not None:
            self._watcher.cancel()


@define(eq=False)
class RequestGuard:
    """The outermost layer. `silence`: seconds that a client may neither send nor read. `inflight`:
    bytes that the bodies of all requests together may have."""

    app: ASGIApp
    body_limit: int
    silence: float
    header_count: int
    header_bytes: int
    show_id: bool = False
    stacks: bool = False
    hosts: HostCheck = field(factory=HostCheck)
    observe: Callable[[Scope, int, float], None] = lambda scope, status, seconds: None
    inflight: int = 256 << 20
    _transfers: set[_Transfer] = field(factory=set, init=False)
    _turns: Turns = field(factory=Turns, init=False)
    held: _Held = field(init=False)
    _patrol: asyncio.Task[None] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.held = _Held(max(self.inflight, self.body_limit))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if await self._welcome(scope, receive, send):
                await self.app(scope, receive, send)
            return
        began = time.monotonic()
        name = scope["modulm.id"] = request_id(scope)
        transfer = _Transfer(asyncio.current_task())
        shown = name.encode() if self.show_id else None
        exchange = _Exchange(receive, send, transfer, self.body_limit, self.held, shown)
        self._watch(transfer)
        scope["modulm.watch"] = exchange.watch
        try:
            await self._answer(scope, exchange)
        except asyncio.CancelledError:
            if transfer.stuck:
                await self._cut_off(scope, exchange)
            elif not exchange.gone:
                raise
        except ClientGone:
            exchange.gone = True
        finally:
            exchange.close()
            self.held.bytes -= exchange.counted
            self._transfers.discard(transfer)
            self.observe(scope, exchange.status or 499, time.monotonic() - began)
        if exchange.gone:
            log.debug("request %s: the client has left", name)

    async def _welcome(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether a web socket may be opened: any page may try, browsers ask nobody before."""
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
            self._check_head(scope)
            if scope["path"] not in _AT_ONCE:
                await self._turns.take()
            await self.app(scope, exchange.take, exchange.give)
        except ClientGone:
            raise
        except Exception as error:
            await self._fail(scope, exchange, error)

    def _check_head(self, scope: Scope) -> None:
        headers = scope["headers"]
        if len(headers) > self.header_count:
            raise _large_head(f"at most {self.header_count} headers are accepted")
        if sum(len(name) + len(value) + 4 for name, value in headers) > self.header_bytes:
            raise _large_head(f"at most {self.header_bytes} bytes of headers are accepted")
        self.hosts.check(scope)
        for name, value in headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise ApiError(415, "the body must not be compressed")
            if name == b"content-length" and value.isdigit():
                if int(value) > self.body_limit:
                    raise _too_large(self.body_limit)
                self.held.check(int(value))

    async def _fail(self, scope: Scope, exchange: _Exchange, error: Exception) -> None:
        """Answer with an error, or end an answer that has begun."""
        if exchange.status is None:
            told = report(error, scope, self.stacks)
            await respond(told)(scope, exchange.take, exchange.give)
        elif not exchange.finished:
            raise error

    async def _cut_off(self, scope: Scope, exchange: _Exchange) -> None:
        """A client that went silent: say so if it can still be said, and hang up."""
        log.info("request %s: the client went silent", scope["modulm.id"])
        if exchange.status is None:
            gone = ApiError(408, "the request was not received in time")
            gone.headers["Connection"] = "close"
            with suppress(Exception):
                await asyncio.wait_for(
                    respond(gone)(scope, exchange.receive, exchange.give), _PATROL
                )

    def _watch(self, transfer: _Transfer) -> None:
        self._transfers.add(transfer)
        if self.silence > 0 and (self._patrol is None or self._patrol.done()):
            self._patrol = asyncio.get_running_loop().create_task(self._walk())

    async def _walk(self) -> None:
        """While there are transfers, end those whose client has kept us waiting too long."""
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


def request_id(scope: Scope) -> str:
    """The id that the client gave in X-Request-Id, made safe, or a fresh one.

    It is for people to find a request again; nothing inside is keyed by it.
    """
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return safe_id(bytes(value[:256]).decode("latin-1")) or uuid4().hex
    return uuid4().hex


def safe_id(given: str) -> str:
    """What is left of a name that a client gave once it can do no harm in a log or a header."""
    return _SAFE_ID.sub("", given[:256])[:128]
