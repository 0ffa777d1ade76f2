"""Middleware of the soak tests (`--middleware watched.Tasks`): reports an event loop's tasks."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

__all__ = ["Tasks"]


class Tasks:
    """Answers GET /soak with the event loop's tasks after a garbage collection, and their
    coroutines.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/soak":
            await self._app(scope, receive, send)
            return
        gc.collect()
        own = asyncio.current_task()
        names = sorted(
            getattr(task.get_coro(), "__qualname__", "?")
            for task in asyncio.all_tasks()
            if task is not own
        )
        body = json.dumps({"tasks": len(names), "names": names}).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
