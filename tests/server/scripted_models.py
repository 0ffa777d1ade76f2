"""Servers of several models whose engines are scripted, with sizes that a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from attrs import define, field

from modulm.config import EngineConfig
from modulm.contracts.tokenizer import Tokenizer
from modulm_server.models.dispatch import Dispatcher
from modulm_server.models.front_engine import FrontEngine
from modulm_server.models.hosted_model import HostedModel
from modulm_server.models.pool import ModelPool
from modulm_server.models.settings import ModelSettings, read_settings
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import Live, serve_in_thread

__all__ = ["Several", "several_models", "write_models"]


class SleepingEngine(ScriptedEngine):
    """A scripted engine that can sleep. level: at which it does, 0 while it is awake."""

    level = 0

    async def sleep(self, level: int = 1) -> None:
        self.level = level

    async def wake_up(self) -> None:
        assert self.level, "it is awake"
        self.level = 0


@define(eq=False)
class Several:
    """A running server and its models. sizes: bytes of each model, 100 unless set."""

    live: Live
    pool: ModelPool
    sizes: dict[str, int] = field(factory=dict)

    def model(self, name: str) -> HostedModel:
        return next(model for model in self.pool.models if model.name == name)

    def call(self, work: Any) -> Any:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.live.loop).result(300)

    def states(self) -> dict[str, str]:
        return {status.name: status.state for status in self.pool.all_statuses()}


@contextmanager
def several_models(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[EngineConfig], Sequence[ModelSettings]] | None = None,
    reply: Callable[..., Reply] = lambda *_: Reply("Hello there."),
    tasks: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    **flags: Any,
) -> Iterator[Several]:
    """Serve models: those that `read` returns, by default those of `--models-config`.

    tasks: by model, of those that do not generate.
    """
    sizes: dict[str, int] = {}

    async def prepare(model: HostedModel) -> EngineConfig:
        model.needed = model.needed or 100
        if model.settings.config.model.model == "broken":
            raise OSError("the file is cut")
        return model.settings.config

    async def measure(model: HostedModel) -> None:
        model.memory = 10 if model.state == "sleeping" else sizes.get(model.name, 100)

    async def changes_within(model: HostedModel, size: int) -> list[str]:
        return [f"--flag {size >> 20}"]

    def start(config: EngineConfig, process: Any) -> SleepingEngine:
        longest = config.model.max_model_len or 2048
        models = config.model.served_model_name
        more = {"tasks": tasks[models[0]]} if models and models[0] in tasks else {}
        info = scripted_info(tokenizer, config=config, max_model_len=longest, models=models, **more)
        return SleepingEngine(tokenizer, reply, info)

    monkeypatch.setattr(HostedModel, "prepare", prepare)
    monkeypatch.setattr(HostedModel, "measure", measure)
    monkeypatch.setattr(HostedModel, "changes_within", changes_within)
    monkeypatch.setattr("modulm_server.models.hosted_model.AsyncLLM.from_config", start)
    monkeypatch.setattr("modulm_server.models.hosted_model.EngineProcess", lambda: None)
    config = EngineConfig.from_keywords(disable_uvicorn_access_log=True, **flags)
    pool = ModelPool(config, lambda: read(config) if read else read_settings(config, ()))
    engine = FrontEngine(pool, config, pool.names)
    with serve_in_thread(engine, config, host=Dispatcher(pool)) as live:
        yield Several(live, pool, sizes)


def write_models(file: Path, *lines: str) -> None:
    """Write a file of models, one per line."""
    file.write_text("models:\n" + "".join(f"  {line}\n" for line in lines))
