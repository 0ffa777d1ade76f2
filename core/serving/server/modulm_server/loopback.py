"""Requests that the server makes to itself, such as the lines of a batch."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from modulm_server.auth import LOOPBACK
from modulm_server.pacing import Answers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

__all__ = ["LoopbackClient", "in_background"]

_background: ContextVar[bool] = ContextVar("modulm_background", default=False)


def in_background() -> bool:
    """Whether the current task answers a request that the server made to itself."""
    return _background.get()


class LoopbackClient:
    """An in-process client of the server's routes. `app` is set once the application is built.

    It needs no API key, because the original request had one. model: on a server of several
    models, the one whose routes it calls; it must be in use by the original request. answers: those
    that clients wait for.
    """

    app: ASGIApp

    def __init__(self, model: Any = None, answers: Answers | None = None) -> None:
        self.model = model
        self.answers = answers or Answers()

    def of_model(self, model: Any) -> LoopbackClient:
        """A client of the routes of one of the server's models."""
        client = LoopbackClient(model, self.answers)
        client.app = self.app
        return client

    async def post(self, path: str, body: bytes, owner: str = "") -> tuple[int, bytes]:
        """POST JSON to a route on behalf of `owner`; returns (status, response body)."""
        status = 500
        answer = bytearray()
        body_sent = False

        async def receive() -> Message:
            nonlocal body_sent
            if body_sent:
                await asyncio.Event().wait()  # this client never disconnects; it is cancelled
            body_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                answer.extend(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
            "modulm.loopback": LOOPBACK,
            "modulm.owner": owner,
            "modulm.model": self.model,
        }
        token = _background.set(True)
        try:
            await self.app(scope, receive, send)
        finally:
            _background.reset(token)
        return status, bytes(answer)
