"""HTTP/1.1 connections that cannot be kept busy for nothing.

uvicorn's protocol on httptools has no bound on the head of a request and none on the time a client
takes to send it, and takes the end of what a client sends for the end of the client. Here heads are
bounded, a client that only closes its sending half gets its answer, and one that has left is told
from it: see `_Bounded.eof_received`.
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
#: Connections where no number is given, and files that are left for other things.
_MOST, _RESERVE = 16_384, 256
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Seconds between two looks at a client that sends nothing more.
_LOOK = 0.02
#: Seconds after which it is asked again; Go's client takes five interim responses at most.
_AGAIN = (1.0, 4.0, 20.0)
_BROKEN = select.POLLHUP | select.POLLERR | select.POLLNVAL
#: Linux tells of a peer's end that has not been read yet; elsewhere nobody asks for it.
_ENDED = select.__dict__.get("POLLRDHUP", 0)


def protocol(head_bytes: int, head_seconds: float, connections: int) -> type[asyncio.Protocol]:
    """A protocol class with these bounds on the head of each request; 0 seconds: no bound.

    connections: that may be open. Beyond that, the one that has waited longest for the rest of its
    request, or for a next one, makes room for a new one; if all are being answered, the new one
    is told 503.
    """
    bounds = {"head_bytes": head_bytes, "head_seconds": head_seconds or 1e9, "most": connections}
    return type("Bounded", (_Bounded,), {**bounds, "idle": {}})


def affordable(connections: int | None) -> int:
    """How many connections this process can hold: as many as asked for, or as there are files for.

    The limit of open files is raised to what the process may have.
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
    #: Connections whose request is not whole, the one that has waited longest first.
    idle: dict[_Bounded, None]
    _head = 0
    _timer: asyncio.TimerHandle | None = None
    _rest: asyncio.TimerHandle | None = None
    _half_closed = False
    _asked = 0
    _ask_at = 0.0
    _looking: asyncio.TimerHandle | None = None
    #: The request that is being answered; `cycle` is the one that came last.
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
        if self.cycle.more_body and self._rest is None:  # answered before the body was here
            self._rest = self.loop.call_later(self.head_seconds, self.transport.close)
        self._serving = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def _make_room(self) -> None:
        """Close the connection that has waited longest, which may be this one."""
        oldest = next(iter(self.idle))
        del self.idle[oldest]
        transport = oldest.transport
        if not transport.is_closing():
            transport.write(_FULL)
            transport.close()

    # The end of what the client sends.

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client will send nothing more; whether the connection stays open for the answer.

        `shutdown(SHUT_WR)` and `close()` look alike until something is sent: who has closed answers
        that with a reset. So an interim response goes out that every client of HTTP/1.1 skips, or
        between two frames of a stream a comment, and the connection is looked at until it is
        broken or the answer is complete. Over TLS nobody closes halves.
        """
        if self.scheme == "https" or self._serving is None or self.cycle.more_body:
            return None
        self.cycle.keep_alive = False
        self._half_closed = True
        self._look()
        return True

    def _probe(self, serving: RequestResponseCycle) -> None:
        """Send what says nothing, at once and then ever more rarely."""
        if self.loop.time() < self._ask_at or self._asked > len(_AGAIN):
            return
        self._ask_at = self.loop.time() + (*_AGAIN, 0.0)[self._asked]
        self._asked += 1
        if self.transport.get_extra_info("socket").family == socket.AF_UNIX:
            return
        if not serving.response_started:
            if serving.scope["http_version"] == "1.1":
                self.transport.write(_CONTINUE)
        elif serving.chunked_encoding and "modulm.filler" in serving.scope:
            filler: bytes = serving.scope["modulm.filler"]  # type: ignore[typeddict-item]
            self.transport.write(b"%x\r\n%b\r\n" % (len(filler), filler))

    def _look_again(self) -> None:
        if self._looking is None:
            self._looking = self.loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        """Hang up if the client is gone; needed while nothing is read from the connection."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        serving = self._serving
        if serving is None or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _ENDED)
        events = next((found for _, found in poll.poll(0)), 0)
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
