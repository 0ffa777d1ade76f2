"""A replica of a model: an engine with the server's own application in front of it.

The application is called as a server would call it, without a network; its ASGI messages are
returned to the caller as lists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import frozen
from ray import serve

from modulm.config.sources import Source, draft, environment
from modulm.errors import EngineDead, ModulmError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_adapters.flags import LoRAConfig
from modulm_parsing.choice import parser_decisions, with_parsers
from modulm_ray_serve.affinity import Route
from modulm_ray_serve.pools import Pool, transfer_table
from modulm_server.app import create_app, import_routes
from modulm_server.engine.adapters import Adapter
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.errors import describe, respond
from modulm_server.flags import ServerConfig
from modulm_server.serve import check_files

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

__all__ = ["Call", "ModelReplica"]

log = logging.getLogger("modulm_server")

#: Adapters that a replica keeps loaded without --max-cpu-loras.
_DEFAULT_ADAPTERS = 32


@frozen
class Call:
    """A request to a replica. scope: the plain values of the ASGI scope. body: all of it."""

    scope: Mapping[str, Any]
    body: bytes = b""


class _Loaded:
    """A loaded adapter. Ray Serve deletes the least recently used one; requests that use it then
    finish normally.
    """

    def __init__(self, engine: AsyncLLM, name: str) -> None:
        self._engine: AsyncLLM | None = engine
        self._name = name

    def __del__(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and engine.dead is None:
            with suppress(Exception):
                engine.unload_adapter(self._name)


class ModelReplica:
    """An engine.

    flags: of `modulm serve`. adapters: name -> folder, loaded on first use. pool: its pool, if any.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, flags: Mapping[str, Any], adapters: Mapping[str, str], pool: Pool | None = None
    ) -> None:
        if pool is not None:
            config = draft(Source("application's arguments", flags), environment()).config
            table = await asyncio.to_thread(transfer_table, pool, config.parallel.ranks)
            flags = {**flags, "kv_transfer_config": table}
        draft_config = draft(Source("application's arguments", flags), environment())
        for notice in draft_config.notices:
            log.warning("%s", notice.message)
        self._engine = await asyncio.to_thread(self._open, draft_config.config)
        self._served = create_app(self._engine, self._config)
        await self._served.start()
        lora = draft_config.config.group(LoRAConfig)
        self._adapters = dict(adapters)
        capacity = lora.max_cpu_loras or max(_DEFAULT_ADAPTERS, lora.max_loras)

        async def load(name: str) -> _Loaded:  # Ray Serve counts models per function
            return await self._adapter(name)

        self._load = serve.multiplexed(max_num_models_per_replica=capacity)(load)

    def _open(self, config: Any) -> AsyncLLM:
        check_files(config.group(ServerConfig))
        plugins = manager.current()
        open_checkpoint(config, plugins)
        self._config = with_parsers(config, parser_decisions(config, plugins))
        return AsyncLLM.from_config(self._config, meanwhile=import_routes)

    async def _adapter(self, name: str) -> _Loaded:
        adapter = Adapter(name, self._adapters[name])
        await asyncio.wrap_future(self._engine.load_adapter(adapter))
        return _Loaded(self._engine, name)

    # Called by Ray Serve.

    async def check_health(self) -> None:
        """Raise EngineDead or EngineStalled: Ray Serve then starts another replica."""
        await self._engine.check_health()

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers learn of this replica."""
        return {"cache_tokens": self._engine.info.cache_tokens}

    async def __del__(self) -> None:
        served = getattr(self, "_served", None)
        if served is not None:
            await served.stop()
            await asyncio.to_thread(self._engine.shutdown)

    # Called by the ingress.

    async def health(self) -> None:
        """See `check_health`; for the ingress."""
        await self._engine.check_health()

    async def ask(self, call: Call, route: Route | None) -> AsyncGenerator[list[Message], None]:
        """Stream the application's answer. route: used by the router only.

        Raises EngineDead if the engine died before the answer began. If the caller disconnects, the
        request is cancelled.
        """
        await self._engine.check_health()
        answer = _Answer(call.body)
        task = asyncio.create_task(self._answer(dict(call.scope), answer))
        task.add_done_callback(lambda _: answer.end())
        first = True
        try:
            while messages := await answer.next():
                if first and self._engine.dead and messages[0].get("status") == 503:
                    raise EngineDead(str(self._engine.dead))
                first = False
                yield messages
            await task
        finally:
            if not task.done():
                answer.disconnected.set()
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def answer(self, call: Call) -> tuple[int, bytes]:
        """(status, body) of the application's answer; for calls to all replicas."""
        status, body = 500, b""
        async for messages in self.ask(call, None):
            for message in messages:
                status = message.get("status", status)
                body += message.get("body", b"")
        return status, body

    async def _answer(self, scope: Scope, answer: _Answer) -> None:
        adapter = serve.get_multiplexed_model_id()
        try:
            if adapter:
                await self._load(adapter)
        except ModulmError as error:
            await respond(describe(error, ""))(scope, answer.receive, answer.send)
            return
        receive: Receive = answer.receive
        send: Send = answer.send
        await self._served.app(scope, receive, send)


class _Answer:
    """The ASGI channels of one request to the application."""

    def __init__(self, body: bytes) -> None:
        self.disconnected = asyncio.Event()
        self._body: bytes | None = body
        self._messages: list[Message] = []
        self._ended = False
        self._changed = asyncio.Event()

    async def receive(self) -> Message:
        """Receive the body, then the disconnect."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Queue a message of the application."""
        self._messages.append(message)
        self._changed.set()

    def end(self) -> None:
        """Mark the answer as complete."""
        self._ended = True
        self._changed.set()

    async def next(self) -> list[Message]:
        """The new messages, at least one; empty at the end."""
        while not self._messages and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        messages, self._messages = self._messages, []
        return messages
