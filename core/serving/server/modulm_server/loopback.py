"""Requests that the server makes to itself, such as the lines of a batch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from modulm_server.auth import LOOPBACK

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

__all__ = ["LoopbackClient"]


class LoopbackClient:
    """An in-process client of the server's routes. `app` is set once the application is built.

    It needs no API key, because the original request had one.
    """

    app: ASGIApp

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
        }
        await self.app(scope, receive, send)
        return status, bytes(answer)
