"""What reaches the awaits of a server of several models: one short life of one.

Its engines are scripted, and take a moment to be prepared.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fault_parts import FIRED, PARTS, Part
from tests.server.scripted_models import Several, several_models, write_models
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from modulm.config import EngineConfig
from modulm.errors import EngineDead, ModulmError
from modulm.testing.checkpoints import make_tokenizer
from modulm_server.app import Served, create_app
from modulm_server.flags import ServerConfig
from modulm_server.models import hosted_model
from modulm_server.models import pool as model_pool
from modulm_server.models.dispatch import Dispatched
from modulm_server.models.hosted_model import HostedModel
from modulm_server.scripted import ScriptedEngine
from modulm_server.serve import Server, make_server, open_socket
from modulm_tokenizers.tokenizer import load_tokenizer

CHAT = "/v1/chat/completions"


def _part(run: Part) -> Part:
    PARTS[run.__name__.replace("_", " ")] = run
    return run


@cache
def _tokenizer() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(make_tokenizer(Path(folder) / "tokenizer", vocab=512))


def _ask(call: Callable[[], Any]) -> Any:
    """What a call on the server's loop gives; None if it fails."""
    with suppress(ModulmError, OSError, CancelledError):
        return call()


def _use(server: Several, file: Path) -> None:
    """Everything that reaches a site, up to the fault."""
    with httpx.Client(base_url=server.live.url, timeout=300) as http:
        for step in _steps(server, http, file):
            if FIRED[0]():
                return
            try:
                step()
            except httpx.TimeoutException:
                raise
            except httpx.TransportError:
                continue


def _steps(server: Several, http: httpx.Client, file: Path) -> Iterator[Callable[[], object]]:
    pool = server.pool

    def chat(model: str, **more: Any) -> Callable[[], object]:
        turns = [{"role": "user", "content": "hi"}]
        body = {"model": model, "messages": turns, "max_tokens": 2, **more}
        return lambda: http.post(CHAT, json=body)

    for model in ("one", "two", "broken", "three"):
        yield chat(model, stream=True)
        yield chat(model)
    yield chat("none")
    yield chat("one", max_tokens=-1, stream=True)
    headers = {"Content-Type": "application/json"}
    yield lambda: http.post(CHAT, content=b"nothing", headers=headers)
    yield lambda: http.post("/v1/audio/transcriptions", data={"model": "one"}, files={"file": b"x"})
    yield lambda: http.get("/v1/models")
    yield lambda: http.post("/models/load", json={"model": "one"})
    yield lambda: http.post("/models/unload", json={"model": "one"})
    yield lambda: http.post("/reset_prefix_cache")
    prompt = {"model": "one", "prompt": "a", "max_tokens": 1}
    yield lambda: http.post("/invocations", json=prompt)
    yield lambda: http.post("/api/show", json={"model": "broken"})

    def open_socket() -> None:
        url = server.live.url.replace("http", "ws")
        with suppress(InvalidStatus, OSError, EOFError):
            connect(f"{url}/v1/realtime?model=none").close()

    yield open_socket

    async def unload_while_it_loads() -> None:
        loading = asyncio.ensure_future(pool.load("one"))
        await asyncio.sleep(0)
        await pool.unload("one")
        await asyncio.gather(loading, return_exceptions=True)

    yield lambda: _ask(lambda: server.call(unload_while_it_loads()))
    yield lambda: _ask(lambda: server.call(pool.load("one")))
    write_models(file, "one: {max_model_len: 64}", "three: {}")
    yield lambda: http.post("/models/reload", json={})
    yield lambda: _ask(lambda: server.call(pool._keep_budget()))
    yield lambda: _ask(lambda: server.call(pool.drain(1.0)))


def _check(server: Several) -> None:
    """A model is loaded and answers, and the patrol's task runs, unless the fault has cancelled it,
    as only its owner does.
    """
    answer = httpx.post(f"{server.live.url}{CHAT}", timeout=300, json={
        "model": "three", "messages": [{"role": "user", "content": "hi"}],
    })  # fmt: skip
    if answer.status_code == 503 and server.pool.closing:  # its start was cancelled
        return
    assert answer.is_success, answer.text
    assert server.pool._patrol is not None
    assert not server.pool._patrol.done() or server.pool._patrol.cancelled()


@_part
def several_models_in_one_server(folder: Path) -> None:
    file, more = folder / "models.yaml", folder / "more"
    write_models(file, "one: {}", "two: {sleep: 1}", "three: {}", "broken: {model: broken}")
    more.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        flags: dict[str, Any] = {
            "models_config": str(file), "models_dir": str(more), "memory_budget": 250,
            "load_comment_interval": 0.01, "server_dev_mode": True,
        }  # fmt: skip
        patch.setattr(model_pool, "_LOOK_AGAIN", 0.0)
        with several_models(_tokenizer(), patch, **flags) as server:
            prepare = HostedModel.prepare

            async def slowly(model: HostedModel) -> Any:
                await asyncio.sleep(0.02)
                return await prepare(model)

            patch.setattr(HostedModel, "prepare", slowly)
            try:
                _use(server, file)
            finally:
                _check(server)


@_part
def a_hosted_model(folder: Path) -> None:
    """What it asks for in threads; an engine that does not start is ended."""
    config, ended = EngineConfig(), []

    async def call(function: Any, seconds: float) -> list[int]:
        await asyncio.sleep(0)
        return [5]

    def refuse(*_: Any) -> Any:
        raise OSError("no")

    engine: Any = SimpleNamespace(process_ids=[os.getpid()], collective_rpc=call)
    model = HostedModel(SimpleNamespace(config=config, name="one"))  # type: ignore[arg-type]
    process = SimpleNamespace(close=lambda: ended.append(1))

    async def main() -> None:
        assert await model.prepare() is config
        assert await model.changes_within(1) == ["--flag"]
        model.engine = engine
        await model.measure()
        assert model.memory > 5
        model.engine = None
        with suppress(OSError):
            await model.open(config, {}, None)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostedModel, "_prepare", lambda _: config)
        patch.setattr(hosted_model, "changes_within", lambda *_: ["--flag"])
        patch.setattr(hosted_model, "EngineProcess", lambda: process)
        patch.setattr(hosted_model.AsyncLLM, "from_config", refuse)
        asyncio.run(main())
    assert ended
    assert model.engine is None


async def _fail(*_: Any, **__: Any) -> Any:
    raise OSError("no")


async def _trouble(server: Several, file: Path, patch: pytest.MonkeyPatch) -> None:
    """What goes wrong, one after the other: on the server's loop."""
    pool, one, two = server.pool, server.model("one"), server.model("two")

    async def tried(work: Any) -> None:
        with suppress(ModulmError, OSError):
            await work

    async def grow_old(model: HostedModel, more: int) -> None:
        model.state = "unloaded"

    await tried(pool.load("one"))
    await tried(server.live.engine.reset_prefix_cache())
    if one.engine is not None:
        one.engine.dead = EngineDead("killed")
    await tried(pool.load("one"))
    await tried(pool.load("two"))
    for broken in ("sleep", "measure"):
        with patch.context() as here:
            here.setattr(HostedModel, broken, _fail)
            await tried(pool._leave(two, evicted=True))
            await tried(pool.load("two"))
    await tried(pool.load("two"))
    await tried(pool._leave(two, evicted=True))
    with patch.context() as here:  # it sleeps, and its next measurement fails
        here.setattr(HostedModel, "measure", _fail)
        await tried(pool.load("two"))
    await tried(pool.unload("two"))
    two.state = "sleeping"
    with patch.context() as here:
        here.setattr(pool, "_make_room", grow_old)
        await tried(pool._load(two))
    await tried(pool.load("one"))
    server.sizes["one"] = 300
    await tried(pool._keep_budget())
    server.sizes["one"] = 100
    for name in ("one", "two", "three"):
        await tried(pool.unload(name))
    one.state, one.memory = "loading", 200
    await tried(pool._make_room(two, 100))
    one.state, one.memory = "unloaded", 0
    for after in (lambda: pool.unload("one"), pool.reload):
        loading = asyncio.ensure_future(pool.load("one"))
        await asyncio.sleep(0)
        write_models(file, "one: {max_model_len: 64}", "two: {sleep: 1}", "three: {}")
        await tried(after())
        await asyncio.gather(loading, return_exceptions=True)
    await asyncio.gather(*(task for task in pool._tasks if task is not pool._patrol))


@_part
def several_models_in_trouble(folder: Path) -> None:
    file = folder / "models.yaml"
    write_models(file, "one: {}", "two: {sleep: 1}", "three: {preload: true}")
    with pytest.MonkeyPatch.context() as patch:
        flags: dict[str, Any] = {"models_config": str(file), "memory_budget": 250}
        with several_models(_tokenizer(), patch, **flags) as server:
            try:
                _ask(lambda: server.call(_trouble(server, file, patch)))
            finally:
                _check(server)


@_part
def a_websocket_of_one_of_several_models(folder: Path) -> None:
    """The model is not in use afterwards."""

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    async def ready(model: Any) -> None:
        await asyncio.sleep(0)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    model = HostedModel(SimpleNamespace(name="one", keep_alive=None))  # type: ignore[arg-type]
    model.routes = SimpleNamespace(endpoints={("", "/ws"): endpoint})  # type: ignore[assignment]
    pool: Any = SimpleNamespace(find=lambda *_: model, closing=False, until_ready=ready)
    nobody: Any = None
    dispatched = Dispatched(pool, nobody, "/ws", nobody)
    scope: Any = {"type": "websocket", "query_string": b"model=one"}
    try:
        asyncio.run(dispatched(scope, receive, send))  # type: ignore[arg-type]
    finally:
        assert not model.in_flight


@_part
def a_server_that_fails(folder: Path) -> None:
    """At its start, and later: its sockets are closed, and its parts are stopped."""
    config = EngineConfig.from_keywords(model="M", host="127.0.0.1", port=0)
    flags = config.group(ServerConfig)
    for owner, name in ((Served, "start"), (Server, "on_tick")):
        server = make_server(create_app(ScriptedEngine(_tokenizer()), config), flags)
        with pytest.MonkeyPatch.context() as patch, suppress(OSError):
            patch.setattr(owner, name, _fail)
            server.serve_on(open_socket(flags))
        assert server._loop_watch._ended.is_set()
