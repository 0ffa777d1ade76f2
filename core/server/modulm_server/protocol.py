"""HTTP/1.1 connections that cannot be kept busy for nothing.

uvicorn's protocol on httptools has no bound on the head of a request and none on the time a
client takes to send it; both are added here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["protocol"]

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: 108\r\n\r\n"
    b'{"error":{"message":"the head of the request is too large",'
    b'"type":"invalid_request_error","param":null}}  '
)


def protocol(head_bytes: int, head_seconds: float) -> type[asyncio.Protocol]:
    """A protocol class with these bounds on the head of each request; 0 seconds: no bound."""

    class Bounded(HttpToolsProtocol):
        """One connection."""

        _head = 0
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_here()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._timer is not None:
                self._head += len(data)
            super().data_received(data)
            if self._timer is not None and self._head > head_bytes:
                self._refuse()

        def on_message_begin(self) -> None:
            self._expect_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head_is_here()
            super().on_headers_complete()

        def _expect_head(self) -> None:
            if self._timer is None:
                self._head = 0
                self._timer = self.loop.call_later(head_seconds or 1e9, self._too_slow)

        def _head_is_here(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

        def _refuse(self) -> None:
            self._head_is_here()
            if not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    return Bounded
