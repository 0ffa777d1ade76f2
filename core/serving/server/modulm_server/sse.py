"""Server-sent events: frames, keep-alive comments, and streams that end with their client."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from modulm_server.errors import ApiError, ClientGone, error_body, report

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine

    from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "EventStream", "event", "frame", "until_disconnect"]

DONE = b"data: [DONE]\n\n"
_EVENTS = "text/event-stream"
_COMMENT = b": still working\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(value: Any) -> bytes:
    """Encode an event with JSON data."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """Encode a named event, as in the streams of Anthropic and of OpenAI's responses."""
    return b"event: " + name.encode() + b"\n" + frame(value)


def _error_frames(error: ApiError) -> bytes:
    return frame(error_body(error)) + DONE


class EventStream(Response):
    """Sends the frames of a generator.

    If the client disconnects, the generator is closed, which aborts the generation. An exception
    in the generator becomes one error frame from `failed(error)`, by default OpenAI's followed by
    [DONE]. quiet: seconds without a frame after which a keep-alive comment is sent; 0 disables
    comments. media: media type of the stream; only event streams have comments. `modulm.filler` in
    the scope is the comment that the connection may send to probe the client.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        quiet: float = 0.0,
        failed: Callable[[ApiError], bytes] = _error_frames,
        media: str = _EVENTS,
    ) -> None:
        super().__init__(None, 200, _HEADERS, media)
        self.media_type = media
        del self.headers["content-length"]
        self._frames = frames
        self._quiet = quiet
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.media_type == _EVENTS:
            scope["modulm.filler"] = _COMMENT
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(head)
        except BaseException:
            await self._discard()
            raise
        watch = scope.get("modulm.watch")
        if watch is not None:
            watch()
            await self._pump(scope, send)
        else:
            with suppress(ClientGone):
                await until_disconnect(self._pump(scope, send), receive)

    async def _discard(self) -> None:
        """Close the generator before its first frame. It must begin, to close what it holds."""
        first = asyncio.ensure_future(anext(self._frames, None))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await self._frames.aclose()

    async def _pump(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._frames) as frames, self._keep_alive(send) as sent:
            try:
                async for data in frames:
                    sent()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except OSError:
                return
            except Exception as error:
                last = self._failed(report(error, scope))
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    @asynccontextmanager
    async def _keep_alive(self, send: Send) -> AsyncIterator[Callable[[], None]]:
        """Send comments while no frames are sent; yields a function to call for each frame."""
        if self._quiet <= 0:
            yield lambda: None
            return
        loop = asyncio.get_running_loop()
        latest = loop.time()

        def sent() -> None:
            nonlocal latest
            latest = loop.time()

        async def comment() -> None:
            while True:
                silent = loop.time() - latest
                if silent >= self._quiet:
                    sent()
                    await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
                else:
                    await asyncio.sleep(self._quiet - silent)

        task = asyncio.ensure_future(comment())
        try:
            yield sent
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await task


async def until_disconnect(work: Coroutine[Any, Any, Any], receive: Receive) -> Any:
    """Run `work` and return its result. If the client disconnects, cancel it; raises ClientGone.

    Not needed behind `RequestGuard`, which cancels the whole endpoint.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watch):
            pending.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await watch
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
