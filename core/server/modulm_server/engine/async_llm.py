"""AsyncLLM: many callers on an event loop, one engine beside it.

The engine core runs in a thread or in a process of its own; here prompts are tokenized, tokens
become text and outputs are handed out. A caller that reads slowly finds what came meanwhile merged
into one output; a caller that goes away takes its request with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from modulm.config.sources import keywords
from modulm.contracts.requests import PromptLike, StepEvents, StepStats
from modulm.contracts.sampling import LogitsProcessor, PoolingParams, SamplingParams
from modulm.engine.types.outputs import PoolingRequestOutput, RequestOutput
from modulm.errors import EngineDead, EngineStalled, QueueFull, RequestError
from modulm.plugins import manager
from modulm_frontend.input_processor import (
    BeamSearchRequest,
    InputProcessor,
    PendingRequest,
)
from modulm_frontend.output_processor import OutputProcessor, RequestState
from modulm_server.engine.client import EngineClient
from modulm_server.engine.core_client import EngineCoreClient, ThreadCoreClient
from modulm_server.engine.metrics import Metrics
from modulm_server.engine.watchdog import Watchdog
from modulm_server.flags import WatchdogConfig

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm_frontend.beam_search import BeamSearchParams
    from modulm_server.engine.adapters import Adapter
    from modulm_server.engine.spawn import EngineProcess

__all__ = ["AsyncLLM"]

#: Seconds until a beam search that was accepted asks again after it found the queue full.
_AGAIN = 0.05
#: Characters up to which a prompt is tokenized on the event loop: a thread costs more than that.
_INLINE = 20_000


class AsyncLLM(EngineClient):
    """An engine for servers.

    Keywords are the flags of `modulm serve` with underscores. Use it from one event loop.
    Raises ConfigError, CheckpointError or PluginError where it cannot start.
    """

    def __init__(self, model: str = "demo", **flags: Any) -> None:
        self._open(keywords(model=model, **flags).config)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        process: EngineProcess | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> AsyncLLM:
        """An engine of a configuration that is complete; in `process`, if one waits for work.

        `meanwhile` is called while the process loads the model.
        """
        made = cls.__new__(cls)
        made._open(config, process, meanwhile)
        return made

    @classmethod
    def connect(cls, address: str) -> AsyncLLM:
        """A further front end of an engine that runs in a process (`EngineProcess.address`)."""
        from modulm_server.engine.process_client import ProcessCoreClient

        made = cls.__new__(cls)
        made._begin()
        made._attach(ProcessCoreClient(address, made._post, made._post_death))
        return made

    def _open(
        self,
        config: EngineConfig,
        process: EngineProcess | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._begin()
        plugins = manager.current()
        if config.parallel.disable_frontend_multiprocessing:
            self._attach(ThreadCoreClient(config, plugins, self._post, self._post_death))
            return
        from modulm_server.engine.process_client import ProcessCoreClient
        from modulm_server.engine.spawn import EngineProcess

        engine = process or EngineProcess()
        engine.start(config, plugins)
        meanwhile()
        self._attach(ProcessCoreClient(engine.address, self._post, self._post_death, engine))

    def _begin(self) -> None:
        self.dead = None
        self.stalled = None
        self._inbox: deque[StepEvents | EngineDead | EngineStalled] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests: dict[str, tuple[RequestState, asyncio.Event]] = {}
        self._beam_searches: dict[str, BeamSearchRequest] = {}
        self._numbers = count()
        self._idle: asyncio.Event | None = None

    def _attach(self, core: EngineCoreClient) -> None:
        self._core = core
        self.address = core.address
        self.info = info = core.info
        self.tokenizer = core.tokenizer()
        self.metrics: Metrics = Metrics(info.models[0], adapters=info.adapters)
        if info.adapters:
            self.metrics.in_use = self._adapters_in_use
        self._input_processor = InputProcessor(
            info, self.tokenizer, manager.current(), _processors(info.config), core.number
        )
        listeners = manager.current().gather("modulm_request_listeners", config=info.config)
        self._output_processor = OutputProcessor(self.metrics, listeners)
        self._interval = info.config.scheduler.stream_interval
        self._ends_waiting = info.config.group(WatchdogConfig).action != "report"
        self._watchdog = Watchdog(core, self._post_stall, self._post_death)

    # What callers ask.

    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        return self._stream(
            partial(self._prepare, prompt, params, request_id, priority, cache_salt, adapter)
        )

    async def beam_search(
        self,
        prompt: PromptLike,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.check_health()
        search = self._input_processor.beam_search(
            prompt, params, request_id, priority=priority, cache_salt=cache_salt, adapter=adapter
        )
        if request_id in self._beam_searches or request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        self._beam_searches[request_id] = search
        try:
            while search.running:
                search.update(await self._next_beams(search))
        finally:
            del self._beam_searches[request_id]
            self._output_processor.count(search.state)
            self._wake_drain()
        output = search.state.take()
        if isinstance(output, RequestOutput):
            yield output

    async def encode(
        self,
        prompt: PromptLike,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        adapter: str | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        job = await _away(prompt, self._input_processor.pooling_job, prompt, params)
        found: list[PoolingRequestOutput] = []
        for place, (ids, own) in enumerate(job.parts):
            name = f"{request_id}.{place}" if place else request_id
            prepare = partial(self._prepare, ids, own, name, priority, None, adapter)
            found += [output async for output in self._stream(prepare)]
        for output in job.join(found):
            yield output

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._core.adapters

    async def refresh_adapters(self) -> None:
        await asyncio.wrap_future(self._core.refresh_adapters())

    def load_adapter(self, adapter: Adapter, *, replace: bool = False) -> Future[None]:
        return self._core.load_adapter(adapter, replace)

    def unload_adapter(self, name: str) -> Future[None]:
        return self._core.unload_adapter(name)

    async def abort(self, request_id: str) -> None:
        found = self._requests.get(request_id)
        if found is not None:
            self._abort(*found)
        search = self._beam_searches.get(request_id)
        if search is not None:
            self._abort_search(search)

    async def drain(self, timeout: float | None = None) -> bool:
        self._idle = asyncio.Event()
        try:
            if self._requests or self._beam_searches:
                await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for search in list(self._beam_searches.values()):
                self._abort_search(search)
            for state, changed in list(self._requests.values()):
                self._abort(state, changed)
            return False
        finally:
            self._idle = None
        return True

    async def reset_prefix_cache(self) -> bool:
        await asyncio.wrap_future(self._core.reset_prefix_cache())
        return True

    async def sleep(self, level: int = 1) -> None:
        await asyncio.wrap_future(self._core.sleep(level))

    async def wake_up(self) -> None:
        await asyncio.wrap_future(self._core.wake_up())

    async def is_sleeping(self) -> bool:
        return await asyncio.wrap_future(self._core.is_sleeping())

    async def start_profile(self) -> None:
        await asyncio.wrap_future(self._core.start_profile())

    async def stop_profile(self) -> None:
        await asyncio.wrap_future(self._core.stop_profile())

    def report_by(self, report: Callable[[], str]) -> None:
        self._core.report = report

    async def reports(self) -> list[str]:
        if self.dead is not None or self.stalled is not None:
            return []
        try:
            return await asyncio.wrap_future(self._core.reports())
        except (EngineDead, EngineStalled):
            return []

    @property
    def stats(self) -> StepStats | None:
        return self.metrics.last

    def _adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Of requests that wait, and of those that run; a search is what its beams are."""
        found: tuple[list[str], list[str]] = ([], [])
        for state, _ in list(self._requests.values()):
            if state.adapter is not None:
                found[state.metrics.first_scheduled_time is not None].append(state.adapter)
        return found

    @property
    def active(self) -> int:
        """A beam search counts once, whatever it asks of the engine."""
        own = sum(state.parent is None for state, _ in self._requests.values())
        return own + len(self._beam_searches)

    def shutdown(self) -> None:
        self._watchdog.stop()
        self._core.close()
        if self.dead is None:
            self._die(EngineDead("the engine was shut down"))

    # How it is done.

    async def _prepare(
        self,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        request_id: str,
        priority: int,
        cache_salt: str | None,
        adapter: str | None,
    ) -> PendingRequest:
        await self.check_health()
        process = partial(
            self._input_processor.process,
            prompt,
            params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        pending: PendingRequest = await _away(prompt, process)
        return pending

    async def _stream(
        self, prepare: Callable[[], Awaitable[PendingRequest]]
    ) -> AsyncGenerator[Any, None]:
        """Submit a request and give its outputs; whatever ends this ends the request."""
        pending = await prepare()
        state, changed = pending.state, asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._output_processor.add(state)
        self._requests[state.id] = (state, changed)
        try:
            self._core.submit(pending.requests)
            while not (state.finished and state.told):
                await changed.wait()
                changed.clear()
                if self._gathers(state):
                    continue
                output = state.take()
                if output is not None:
                    yield output
        finally:
            self._abort(state, changed)
            del self._requests[state.id]
            self._wake_drain()

    async def _next_beams(self, search: BeamSearchRequest) -> RequestOutput:
        """The next token of every beam. A full queue refuses a search only at its beginning."""
        begun = search.state.cached is not None

        async def prepare() -> PendingRequest:
            return search.next_step(f"{search.state.id}+{next(self._numbers)}")

        while True:
            try:
                async with aclosing(self._stream(prepare)) as outputs:
                    found: list[RequestOutput] = [output async for output in outputs]
                    return found[-1]
            except QueueFull:
                if not begun:
                    raise
                await asyncio.sleep(_AGAIN)

    def _abort_search(self, search: BeamSearchRequest) -> None:
        self._output_processor.abort(search.state)
        for state, changed in list(self._requests.values()):
            if state.parent is search.state:
                self._abort(state, changed)

    def _abort(self, state: RequestState, changed: asyncio.Event) -> None:
        """End a request that has not ended by itself, or whose end nobody has seen."""
        if not state.finished or not state.told:
            for identity in self._output_processor.abort(state):
                self._core.abort(identity)
            changed.set()

    def _wake_drain(self) -> None:
        """Wake drain() when idle."""
        if self._idle is not None and not self._requests and not self._beam_searches:
            self._idle.set()

    def _gathers(self, state: RequestState) -> bool:
        """Whether to wait for more tokens before the next output (`--stream-interval`)."""
        return state.streamed and not state.finished and state.fresh < self._interval

    # From the engine core, on a thread of its client.

    def _post_death(self, error: EngineDead) -> None:
        self.dead = self.dead or error
        self._post(self.dead)

    def _post_stall(self, error: EngineStalled | None) -> None:
        self.stalled = error
        if error is not None and self._ends_waiting:
            self._core.give_up(error)
            self._post(error)

    def _post(self, item: StepEvents | EngineDead | EngineStalled) -> None:
        self._inbox.append(item)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._process_inbox)

    # On the event loop.

    def _process_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, EngineDead):
                self._die(item)
                continue
            if isinstance(item, EngineStalled):
                self._end_waiting(item)
                continue
            states, stopped = self._output_processor.process(item)
            for identity in stopped:
                self._core.abort(identity)
            for state in states:
                self._requests[state.id][1].set()

    def _end_waiting(self, error: EngineStalled) -> None:
        """End every request; an engine that comes back is to know."""
        for state, _ in list(self._requests.values()):
            for identity in state.ids:
                self._core.abort(identity)
        for state in self._output_processor.fail_all(error):
            self._requests[state.id][1].set()

    def _die(self, error: EngineDead) -> None:
        self.dead = error
        for state in self._output_processor.fail_all(error):
            self._requests[state.id][1].set()


async def _away(prompt: PromptLike, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call here if the prompt is quickly read, else in a thread."""
    long = isinstance(prompt, str) and len(prompt) > _INLINE
    return await asyncio.to_thread(function, *arguments) if long else function(*arguments)


def _processors(config: EngineConfig) -> tuple[type[LogitsProcessor], ...]:
    """The processors' classes, which may check parameters; mostly there are none, and no torch."""
    plugins = manager.current()
    given = config.model.logits_processors
    if not given and not plugins.names("logits_processors"):
        return ()
    from modulm.engine.sampling.logits_processors import processor_classes

    return processor_classes(given, plugins)
