"""What is taken from gRPC's clients: messages of those with a key, and a bounded number at once.

gRPC would receive the message of every call whole before anything asks who sent it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc

from modulm_route_grpc.http_calls import CallFailed, client_headers
from modulm_server.auth import find_key
from modulm_server.errors import ApiError

if TYPE_CHECKING:
    from modulm_server.api_keys import Keys

__all__ = ["Intake", "message_limit"]

#: Bytes of a message for each token of the model's context, and for any model.
_BYTES_PER_TOKEN, _LEAST = 16, 4 << 20
#: Services that tell nothing of clients or their requests. HealthCheck is as open as /health.
_OPEN = (
    "/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/",
    "/vllm.grpc.engine.VllmEngine/HealthCheck",
)  # fmt: skip


def message_limit(context_tokens: int, most: int) -> int:
    """Bytes of the largest message. most: of a body of HTTP."""
    return min(most, max(_LEAST, _BYTES_PER_TOKEN * context_tokens))


async def _whole(write: Awaitable[None]) -> None:
    """Send a message to its end, also if the call is cancelled: no status can follow a part."""
    writing = asyncio.ensure_future(write)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


class Intake(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks the key of a call before it receives the call's message.

    at_once: messages that are received at the same time; each sender may have half of them.
    patience: seconds for a message; 0: no limit.
    """

    def __init__(self, keys: Keys, at_once: int, patience: float) -> None:
        self._keys = keys
        self._at_once = at_once
        self._patience = patience or None
        self._receiving: Counter[str] = Counter()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return the method's handler, which receives its messages here."""
        handler = await continuation(details)
        if handler is None:
            return None
        is_open = details.method.startswith(_OPEN)
        inner = next(
            one for one in (handler.unary_unary, handler.unary_stream,
                            handler.stream_unary, handler.stream_stream) if one is not None
        )  # fmt: skip
        decode = handler.request_deserializer or bytes

        async def messages(raw: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            while (data := await self._take(raw, context, is_open)) is not None:
                yield decode(data)

        async def request(raw: AsyncIterator[bytes], context: Any) -> Any:
            """What the method takes: a message, or all of them."""
            if handler.request_streaming:
                return messages(raw, context)
            data = await self._take(raw, context, is_open)
            if data is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
            return decode(data or b"")

        async def answered(raw: AsyncIterator[bytes], context: Any) -> Any:
            try:
                given = await request(raw, context)
                if not inspect.isasyncgenfunction(inner):
                    return await inner(given, context)
                async with aclosing(inner(given, context)) as responses:
                    async for response in responses:
                        await _whole(context.write(response))
            except asyncio.CancelledError:
                # grpcio sends no status then: a client that is still there would wait for ever.
                if not context.done():
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ended the call")
                raise
            return None

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(answered, response_serializer=handler.response_serializer)

    async def _take(self, raw: AsyncIterator[bytes], context: Any, is_open: bool) -> bytes | None:
        """The next message of a call, None after the last. Ends a call that may not send one."""
        try:
            return await self._receive(raw, client_headers(context), is_open)
        except CallFailed as error:
            await context.abort(error.code, error.message, error.details)
            raise

    async def _receive(
        self, raw: AsyncIterator[bytes], headers: list[tuple[bytes, bytes]], is_open: bool
    ) -> bytes | None:
        sender = "" if is_open else self._sender(headers)
        if (
            self._receiving.total() >= self._at_once
            or self._receiving[sender] >= (self._at_once + 1) // 2
        ):
            raise CallFailed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the server receives as many messages as it can; try again later",
                (("retry-after", "1"),),
            )
        self._receiving[sender] += 1
        try:
            async with asyncio.timeout(self._patience):
                return await anext(raw)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise CallFailed(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the message was not received in time"
            ) from None
        finally:
            self._receiving[sender] -= 1
            if not self._receiving[sender]:
                del self._receiving[sender]

    def _sender(self, headers: list[tuple[bytes, bytes]]) -> str:
        """The owner of the key of a call. Raises CallFailed without a valid one."""
        if not self._keys:
            return ""
        found = find_key(self._keys, headers)
        if isinstance(found, ApiError):
            code = grpc.StatusCode.UNAUTHENTICATED
            raise CallFailed(
                code if found.status == 401 else grpc.StatusCode.INVALID_ARGUMENT, str(found)
            )
        return found.owner
