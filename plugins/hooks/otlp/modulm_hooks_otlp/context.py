"""The trace context of an HTTP request, from its headers `traceparent` and `tracestate`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from attrs import frozen

from modulm_frontend.origin import request_origin

__all__ = ["Incoming", "IncomingContext"]

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
_HEADERS = (b"traceparent", b"tracestate", b"baggage")


@frozen
class Incoming:
    """An HTTP request. carrier: its trace context headers."""

    path: str
    carrier: Mapping[str, str]


class IncomingContext:
    """ASGI middleware that links engine requests to the HTTP request that caused them."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _HEADERS
        }
        token = request_origin.set(Incoming(scope["path"], carrier))
        try:
            await self._app(scope, receive, send)
        finally:
            request_origin.reset(token)
