"""HTTP/1.1 connections with limits on idle and slow clients.

uvicorn's httptools protocol has no limit on the size of a request's head or on the time to send it,
and treats the end of a client's sending as a disconnect. Here heads are limited, and a client that
closes only its sending half gets its response; see `_Bounded.eof_received`.
"""

from __future__ import annotations

import asyncio
import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["affordable", "protocol"]

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: 108\r\n\r\n"
    b'{"error":{"message":"the head of the request is too large",'
    b'"type":"invalid_request_error","param":null}}  '
)
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: 99\r\n\r\n"
    b'{"error":{"message":"too many connections","type":"server_error",'
    b'"param":null,"code":"overloaded"}}'
)
#: Default maximum of connections, and file descriptors to leave for other uses.
_MOST, _RESERVE = 16_384, 256
#: Interim responses: the first for requests with `Expect: 100-continue`, the other for the rest.
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
#: Seconds between two checks of a half-closed connection.
_LOOK = 0.02
#: Seconds between probes of it; Go's client accepts at most five interim responses.
_AGAIN = (1.0, 4.0, 20.0)
_BROKEN = select.POLLHUP | select.POLLERR | select.POLLNVAL
#: Linux reports a peer's end before it is read; other systems lack this flag.
_ENDED = select.__dict__.get("POLLRDHUP", 0)


def protocol(head_bytes: int, head_seconds: float, connections: int) -> type[asyncio.Protocol]:
    """Create a protocol class with limits on the head of each request; 0 seconds: no limit.

    connections: maximum of open connections. Beyond it, the connection that has waited longest for
    a request is closed for the new one. If all are busy, the new one gets a 503.
    """
    bounds = {"head_bytes": head_bytes, "head_seconds": head_seconds or 1e9, "most": connections}
    return type("Bounded", (_Bounded,), {**bounds, "idle": {}})


def affordable(connections: int | None) -> int:
    """The number of connections that this process can open, by the flag and the limit of files.

    Raises the soft limit of open files as far as allowed.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return connections or _MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        raised = _MOST + _RESERVE if hard == resource.RLIM_INFINITY else hard
        if raised > soft:
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
                soft = raised
        return min(connections or _MOST, max(1, soft - _RESERVE))
    return connections or _MOST


class _Bounded(HttpToolsProtocol):
    """One connection."""

    head_bytes: int
    head_seconds: float
    most: int
    #: Connections without a complete request, the longest-waiting first.
    idle: dict[_Bounded, None]
    _head = 0
    _timer: asyncio.TimerHandle | None = None
    _rest: asyncio.TimerHandle | None = None
    _half_closed = False
    _probes_sent = 0
    _next_probe = 0.0
    _looking: asyncio.TimerHandle | None = None
    #: The request in progress; `cycle` is the latest one.
    _serving: RequestResponseCycle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()
        self.idle[self] = None
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._rest_is_here()
        self.idle.pop(self, None)
        serving = self._serving
        if serving is not None and not serving.response_complete:
            serving.disconnected = True
            serving.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            self._head += len(data)
        super().data_received(data)
        if self._timer is not None and self._head > self.head_bytes:
            self._refuse()

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()
        if not self.pipeline:
            self._serving = self.cycle
        else:
            self._look_again()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.idle.pop(self, None)
        self._rest_is_here()

    def on_response_complete(self) -> None:
        self.idle[self] = None
        if self.cycle.more_body and self._rest is None:  # answered before the body arrived
            self._rest = self.loop.call_later(self.head_seconds, self.transport.close)
        self._serving = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def _make_room(self) -> None:
        """Close the longest-waiting connection, which may be this one."""
        oldest = next(iter(self.idle))
        del self.idle[oldest]
        transport = oldest.transport
        if not transport.is_closing():
            transport.write(_FULL)
            transport.close()

    # The end of what the client sends.

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client has finished sending; returns whether to keep the connection for the response.

        `shutdown(SHUT_WR)` and `close()` look alike until something is sent, which a closed peer
        answers with a reset. So the server sends an interim response, which HTTP/1.1 clients
        skip, or a comment between two frames of a stream, and checks the connection until it is
        broken or the response is complete. TLS clients do not half-close.
        """
        if self.scheme == "https" or self._serving is None or self.cycle.more_body:
            return None
        self.cycle.keep_alive = False
        self._half_closed = True
        self._look()
        return True

    def _probe(self, serving: RequestResponseCycle) -> None:
        """Send a probe that clients ignore, at increasing intervals."""
        if self.loop.time() < self._next_probe or self._probes_sent > len(_AGAIN):
            return
        self._next_probe = self.loop.time() + (*_AGAIN, 0.0)[self._probes_sent]
        self._probes_sent += 1
        if self.transport.get_extra_info("socket").family == socket.AF_UNIX:
            return
        if not serving.response_started:
            if serving.scope["http_version"] == "1.1":
                expects = (b"expect", b"100-continue") in serving.scope["headers"]
                self.transport.write(_CONTINUE if expects else _PROCESSING)
        elif serving.chunked_encoding and "modulm.filler" in serving.scope:
            filler: bytes = serving.scope["modulm.filler"]  # type: ignore[typeddict-item]
            self.transport.write(b"%x\r\n%b\r\n" % (len(filler), filler))

    def _look_again(self) -> None:
        if self._looking is None:
            self._looking = self.loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        """Abort a broken connection; needed while nothing is read from it."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        serving = self._serving
        if serving is None or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _ENDED)
        events = next((flags for _, flags in poll.poll(0)), 0)
        if events & _BROKEN:
            self.transport.abort()
            return
        if self._half_closed or events & _ENDED:
            self._probe(serving)
        if self._half_closed or self.pipeline:
            self._look_again()

    # The head of a request.

    def _expect_head(self) -> None:
        if self._timer is None:
            self._head = 0
            self._timer = self.loop.call_later(self.head_seconds, self._too_slow)

    def _head_is_here(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest_is_here(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _refuse(self) -> None:
        self._head_is_here()
        if not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()
