"""One model of a server of several: its engine's life, and what it is used for."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from attrs import define, field

from modulm.errors import EngineError, UnsupportedError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_memory.usage import device_bytes
from modulm_parsing.choice import parser_decisions, with_parsers
from modulm_server.app import ModelRoutes, model_routes
from modulm_server.directory import ModelStatus
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.engine.spawn import EngineProcess
from modulm_server.models.flags import ModelsConfig
from modulm_server.models.memory import Needs, changes_within, measure, needs_of

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.engine_info import EngineInfo
    from modulm_server.engine.client import EngineClient
    from modulm_server.loopback import LoopbackClient
    from modulm_server.models.settings import ModelSettings

__all__ = ["HostedModel"]

#: Seconds between two looks whether the last request of a model has ended.
_LOOK = 0.1
#: Seconds in which an engine must tell the memory of its devices.
_ANSWER = 5.0


@define(eq=False)
class HostedModel:
    """A model and its engine, if it is loaded.

    state: as in `ModelStatus`. in_flight: requests that use it. waiters: requests that wait for it,
    each by an object of its own. admitted: those of them that its last load was for; they start
    before it is unloaded again. memory: bytes that count as in use: the estimate while it loads,
    then as measured. needed: bytes that it needs when loaded, as known so far. estimate: what it
    was expected to need before it was loaded. loading: the load in progress. leaving: the end of
    its use that is in progress; no request starts meanwhile. last_used, expires: monotonic seconds,
    which no jump of the clock changes. info: facts of its last engine.
    """

    settings: ModelSettings
    state: str = "unloaded"
    engine: EngineClient | None = None
    routes: ModelRoutes | None = None
    in_flight: int = 0
    waiters: set[object] = field(factory=set)
    admitted: set[object] = field(factory=set)
    memory: int = 0
    needed: int = 0
    estimate: Needs | None = None
    last_used: float | None = None
    expires: float | None = None
    error: str | None = None
    info: EngineInfo | None = None
    loading: asyncio.Task[None] | None = None
    leaving: asyncio.Task[None] | None = None
    loads: int = 0
    _process: EngineProcess | None = None
    _on_devices: int = 0
    _measures_devices: bool = True
    _freed: asyncio.Event = field(factory=asyncio.Event, init=False)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def ready(self) -> bool:
        """Whether requests may use it now."""
        return (
            self.state == "loaded"
            and self.leaving is None
            and self.engine is not None
            and self.engine.dead is None
        )

    @property
    def busy(self) -> bool:
        """Whether requests use it, including those that run in the background or start next."""
        if self.in_flight or self.admitted:
            return True
        return self.engine is not None and not self.engine.dead and self.engine.active > 0

    @property
    def in_memory(self) -> bool:
        """Whether it has an engine, or gets one."""
        return self.engine is not None or self.loading is not None

    def release(self, keep_alive: float | None) -> None:
        """Note the end of a request. keep_alive: seconds until it expires; None: never."""
        self.in_flight -= 1
        self.last_used = now = time.monotonic()
        self.expires = None if keep_alive is None else now + keep_alive
        if self.leaving is not None:
            self._freed.set()

    async def until_idle(self) -> None:
        """Wait until no request uses it."""
        while self.busy:
            self._freed.clear()
            try:
                await asyncio.wait_for(self._freed.wait(), _LOOK)
            except TimeoutError:
                continue

    async def prepare(self) -> EngineConfig:
        """Find the checkpoint, download it if need be, and estimate its memory; returns the
        engine's configuration. Raises CheckpointError, ConfigError.
        """
        return await asyncio.to_thread(self._prepare)

    def _prepare(self) -> EngineConfig:
        plugins, config = manager.current(), self.settings.config
        checkpoint = open_checkpoint(config, plugins)
        if self.estimate is None:
            budget = config.group(ModelsConfig).memory_budget
            self.estimate = needs_of(config, plugins, checkpoint.path, budget)
            self.needed = self.estimate.bytes
        return with_parsers(self.estimate.config, parser_decisions(config, plugins))

    async def changes_within(self, size: int) -> list[str]:
        """Flags, with reasons, with which it needs at most `size` bytes."""
        return await asyncio.to_thread(
            changes_within, self.settings.config, manager.current(), size
        )

    async def open(
        self, config: EngineConfig, stores: MutableMapping[str, Any], loopback: LoopbackClient
    ) -> None:
        """Start the engine and build its routes. loopback: the front end's.

        Raises the engine's error if it does not start.
        """
        self.state, self.memory = "loading", self.needed
        self._on_devices, self._measures_devices = 0, True
        try:
            self._process = EngineProcess()
            engine = await asyncio.to_thread(AsyncLLM.from_config, config, self._process)
            self.engine = engine
            self.info = engine.info
            self.routes = model_routes(engine, config, stores, loopback.of_model(self))
            await self.routes.start()
            await self.measure()
            self.needed = max(self.needed, self.memory)
        except BaseException:
            await self._close_engine()
            raise
        self.loads += 1
        self._note_use()

    def abandon(self) -> None:
        """Kill an engine that is being loaded, which ends its load with an error."""
        if self.state == "loading" and self._process is not None:
            self._process.kill()

    async def wake(self) -> None:
        """Wake the engine up. Raises EngineError."""
        if self.engine is None:
            raise EngineError("the engine is gone")
        self.state = "loading"
        self.memory = max(self.memory, self.needed)
        await self.engine.wake_up()
        await self.measure()
        self._note_use()

    def _note_use(self) -> None:
        self.state, self.error = "loaded", None
        self.last_used = now = time.monotonic()
        keep_alive = self.settings.keep_alive
        self.expires = None if keep_alive is None else now + keep_alive

    async def sleep(self, level: int) -> None:
        """Put the engine to sleep. Raises EngineError, UnsupportedError."""
        if self.engine is None:
            raise EngineError("the engine is gone")
        await self.engine.sleep(level)
        self.state = "sleeping"
        await self.measure()

    async def close(self) -> None:
        """End the engine and its processes."""
        self.state = "stopping"
        try:
            await self._close_engine()
        finally:
            self.state = "unloaded"

    async def stop_routes(self) -> None:
        """Stop what its routes run; its engine goes on."""
        routes, self.routes = self.routes, None
        if routes is not None:
            await routes.stop()

    async def _close_engine(self) -> None:
        engine, self.engine = self.engine, None
        process, self._process = self._process, None
        self.admitted = set()
        try:
            await self.stop_routes()
        finally:
            if engine is not None:
                await asyncio.to_thread(engine.shutdown)
            elif process is not None:
                await asyncio.to_thread(process.close)
            self.memory = 0

    async def measure(self) -> None:
        """Measure the memory of the engine's processes."""
        engine = self.engine
        if engine is not None:
            measured = await asyncio.to_thread(measure, engine.process_ids)
            await self._measure_devices(engine)
            self.memory = measured + self._on_devices or engine.info.description.weight_bytes

    async def _measure_devices(self, engine: EngineClient) -> None:
        """Measure the engine's memory on devices that have memory of their own."""
        if self._measures_devices:
            with suppress(EngineError, UnsupportedError):  # too busy, or it has died
                held = await engine.collective_rpc(device_bytes, _ANSWER)
                self._on_devices = sum(size or 0 for size in held)
                self._measures_devices = any(size is not None for size in held)

    @property
    def reserved(self) -> int:
        """Bytes of the budget that it uses: a loaded model may use all that it needs any time."""
        return max(self.memory, self.needed) if self.state == "loaded" else self.memory

    @property
    def beyond_estimate(self) -> int:
        """Bytes in use that were not expected before it was loaded."""
        expected = self.memory if self.estimate is None else self.estimate.bytes
        return max(0, self.memory - expected)

    def status(self) -> ModelStatus:
        """Describe it."""
        engine, settings = self.engine, self.settings
        dead = engine is not None and engine.dead is not None
        state = "stopping" if self.leaving is not None else self.state
        return ModelStatus(
            name=self.name,
            model=settings.config.model.model,
            state="failed" if dead else state,
            aliases=settings.aliases,
            error="its engine has died; the next request loads it" if dead else self.error,
            memory=self.memory or self.needed,
            last_used=_unix_time(self.last_used),
            expires_at=None if settings.pinned else _unix_time(self.expires),
            active=self.in_flight,
            waiting=len(self.waiters),
            pinned=settings.pinned,
            info=self.info,
            adapters={}
            if engine is None
            else {
                adapter.name: adapter.root or adapter.path
                for adapter in engine.adapters.values()
                if adapter.owner is None
            },
        )


def _unix_time(moment: float | None) -> float | None:
    """The time of day of a moment in monotonic seconds."""
    return None if moment is None else moment + time.time() - time.monotonic()
