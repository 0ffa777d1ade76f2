"""AsyncLLM: many callers on an event loop share one engine.

The engine core runs in a thread or a separate process. This module tokenizes prompts, detokenizes
outputs and distributes them. Outputs that a slow caller has not read are merged into one. If a
caller stops iterating, its request is aborted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from modulm.config.sources import keywords
from modulm.contracts.outputs import PoolingRequestOutput, RequestOutput
from modulm.contracts.requests import PromptLike, Request, StepEvents, StepStats
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.errors import (
    ConfigError,
    EngineDead,
    EngineStalled,
    EngineTimeout,
    QueueFull,
    RequestError,
)
from modulm.plugins import manager
from modulm_fleet.placement import Placement, placement
from modulm_frontend.input_processor import (
    BeamSearchRequest,
    InputProcessor,
    PendingRequest,
)
from modulm_frontend.output_processor import OutputProcessor, RequestState
from modulm_frontend.worker_calls import check_call
from modulm_server.engine.client import EngineClient, ReplicaHealth, Tenant
from modulm_server.engine.core_client import (
    EngineCoreClient,
    ReplicaEvents,
    ReplicaLost,
    ReplicaReady,
    ThreadCoreClient,
    WorkerCall,
)
from modulm_server.engine.metrics import Metrics, ReplicaMetrics
from modulm_server.engine.processors import installed_processors
from modulm_server.engine.restarts import Restarts
from modulm_server.engine.training import keeps_back
from modulm_server.engine.watchdog import Watchdog
from modulm_server.flags import ServerConfig, WatchdogConfig
from modulm_weight_transfer.engine import WeightState, wakes_weights_alone

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_frontend.beam_search import BeamSearchParams
    from modulm_server.engine.adapters import Adapter
    from modulm_server.engine.spawn import EngineProcess

__all__ = ["AsyncLLM"]

#: Items that the engine's client posts.
_Item: TypeAlias = (
    StepEvents
    | ReplicaEvents
    | ReplicaLost
    | ReplicaReady
    | EngineDead
    | EngineStalled
    | WeightState
)

#: Seconds between retries of an accepted beam search while the queue is full.
_AGAIN = 0.05
#: Longest prompt (characters) to tokenize on the event loop, where it is cheaper than in a thread.
_INLINE = 20_000


class AsyncLLM(EngineClient):
    """An engine for servers.

    Keywords are the flags of `modulm serve` with underscores. Use it from one event loop. Raises
    ConfigError, CheckpointError or PluginError if the engine cannot start.
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
        """Create an engine from a complete configuration. process: a waiting engine process to use.

        `meanwhile` is called while the process loads the model.
        """
        engine = cls.__new__(cls)
        engine._open(config, process, meanwhile)
        return engine

    @classmethod
    def connect(cls, address: str) -> AsyncLLM:
        """Connect another front end to a running engine or its replicas. address: the `address` of
        their first front end.
        """
        from modulm_server.engine.process_client import ProcessCoreClient
        from modulm_server.engine.replicas import ReplicaSet

        engine = cls.__new__(cls)
        engine._begin()
        if address.startswith("["):
            engine._attach(ReplicaSet.join(address, engine._post, engine._post_death))
        else:
            engine._attach(ProcessCoreClient(address, engine._post, engine._post_death))
        return engine

    def _open(
        self,
        config: EngineConfig,
        process: EngineProcess | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._begin()
        plugins = manager.current()
        placed = placement(config)
        if placed.several or config.group(ServerConfig).restart:
            self._open_replicas(config, placed, process, meanwhile)
            return
        self._rank = placed.served.start
        if config.parallel.disable_frontend_multiprocessing:
            self._attach(ThreadCoreClient(config, plugins, self._post, self._post_death))
            return
        from modulm_server.engine.process_client import ProcessCoreClient
        from modulm_server.engine.spawn import EngineProcess

        engine = process or EngineProcess()
        engine.start(config, plugins)
        meanwhile()
        self._attach(ProcessCoreClient.of(engine, config, plugins, self._post, self._post_death))

    def _open_replicas(
        self,
        config: EngineConfig,
        placed: Placement,
        process: EngineProcess | None,
        meanwhile: Callable[[], None],
    ) -> None:
        if config.parallel.disable_frontend_multiprocessing:
            raise ConfigError(
                "data_parallel_size" if placed.several else "restart",
                "engines run in separate processes: remove --disable-frontend-multiprocessing",
            )
        from modulm_server.engine.replicas import ReplicaSet

        plugins, post, died = manager.current(), self._post, self._post_death
        self._attach(ReplicaSet.open(config, plugins, post, died, placed, process, meanwhile))

    def _begin(self) -> None:
        self.dead = None
        self.stalled = None
        self._inbox: deque[_Item] = deque()
        self._rank = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests: dict[str, tuple[RequestState, asyncio.Event]] = {}
        self._beam_searches: dict[str, BeamSearchRequest] = {}
        self._numbers = count()
        self._idle: asyncio.Event | None = None
        #: Set while the engine is not paused.
        self._running = asyncio.Event()
        self._running.set()

    def _attach(self, core: EngineCoreClient) -> None:
        self._core = core
        self.address = core.address
        self.info = info = core.info
        self.tokenizer = core.tokenizer()
        ranks = core.ranks or (self._rank,)
        adapters = info.limit("adapters", "slots")
        each = [Metrics.of(info, str(rank), adapters) for rank in ranks]
        if adapters:
            for metrics in each:
                metrics.in_use = self._adapters_in_use
        self.metrics: Metrics | ReplicaMetrics = each[0] if len(each) == 1 else ReplicaMetrics(each)
        self._input_processor = InputProcessor(
            info, self.tokenizer, manager.current(), installed_processors(info.config), core.number
        )
        self._each = each
        listeners = manager.current().gather("modulm_request_listeners", config=info.config)
        self._output_processor = OutputProcessor(each[0], listeners)
        self._restarts = Restarts(core, self._output_processor)
        self._interval = info.config.scheduler.stream_interval
        self._ends_waiting = info.config.group(WatchdogConfig).action != "report"
        sleeping = info.config.group(ServerConfig).sleeping_requests
        self._keeps_back = partial(keeps_back, sleeping == "wait")
        self._watchdog = Watchdog(core, self._post_stall, self._post_death)
        core.weights_changed = self._post_weights

    # Called by users.

    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        own = {"priority": priority, "cache_salt": cache_salt, "adapter": adapter}
        more = {**own, **_tenant(tenant)}
        return self._stream(partial(self._prepare, prompt, params, request_id, **more))

    async def beam_search(
        self,
        prompt: PromptLike,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.check_health()
        more = {"cache_salt": cache_salt, "adapter": adapter, **_tenant(tenant)}
        search = self._input_processor.beam_search(
            prompt, params, request_id, priority=priority, **more
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
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        job = await _away(prompt, self._input_processor.pooling_job, prompt, params)
        outputs: list[PoolingRequestOutput] = []
        for index, (ids, part_params) in enumerate(job.parts):
            name = f"{request_id}.{index}" if index else request_id
            more = {"cache_salt": cache_salt, "adapter": adapter, **_tenant(tenant)}
            prepare = partial(self._prepare, ids, part_params, name, priority=priority, **more)
            outputs += [output async for output in self._stream(prepare)]
        for output in job.join(outputs):
            yield output

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._core.adapters

    @property
    def replicas(self) -> Sequence[ReplicaHealth]:
        return self._core.replicas

    def rolling_restart(self) -> None:
        self._core.rolling_restart()

    process_ids = property(lambda self: self._core.process_ids)

    async def check_health(self) -> None:
        await super().check_health()
        if (error := self._core.down) is not None:
            raise error
        if (broken := self._core.weights.broken) is not None:
            raise EngineStalled(broken)

    async def refresh_adapters(self) -> None:
        await asyncio.wrap_future(self._core.refresh_adapters())

    def load_adapter(self, adapter: Adapter, *, replace: bool = False) -> Future[None]:
        return self._core.load_adapter(adapter, replace)

    def unload_adapter(self, name: str) -> Future[None]:
        return self._core.unload_adapter(name)

    async def abort(self, request_id: str) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            self._abort(*running)
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
        if level == 0:
            await self.run_weights("doze")
        else:
            await asyncio.wrap_future(self._core.sleep(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        alone = wakes_weights_alone(tags, self._core.weights.asleep)
        await (self.run_weights("restore") if alone else asyncio.wrap_future(self._core.wake_up()))

    async def is_sleeping(self) -> bool:
        core = self._core
        return core.weights.asleep == 0 or await asyncio.wrap_future(core.is_sleeping())

    async def start_profile(self) -> None:
        await asyncio.wrap_future(self._core.start_profile())

    async def stop_profile(self) -> None:
        await asyncio.wrap_future(self._core.stop_profile())

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        await self.check_health()
        check_call(method, timeout)
        answers = self._core.call_workers(WorkerCall(method, args, kwargs or {}, timeout))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answers), timeout)
        except EngineTimeout:
            raise
        except TimeoutError as error:
            raise EngineTimeout(f"{method}: no answer within {timeout:g} s") from error

    @property
    def weight_version(self) -> int:
        return self._core.weights.weight_version

    async def is_paused(self) -> bool:
        return self._core.weights.paused is not None

    async def run_weights(self, operation: str, **arguments: Any) -> dict[str, Any]:
        if self.dead is not None:
            raise self.dead
        self._loop = asyncio.get_running_loop()
        if operation == "finish":
            arguments["weight_version"] = self.weight_version + 1
        return await asyncio.wrap_future(self._core.run_weights(operation, arguments))

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
        """The adapters of waiting and of running requests, including those of beams."""
        adapters: tuple[list[str], list[str]] = ([], [])
        for state, _ in list(self._requests.values()):
            if state.adapter is not None:
                adapters[state.metrics.first_scheduled_time is not None].append(state.adapter)
        return adapters

    @property
    def active(self) -> int:
        """The number of unfinished requests; a beam search counts once."""
        requests = sum(state.parent is None for state, _ in self._requests.values())
        return requests + len(self._beam_searches)

    def shutdown(self) -> None:
        self._watchdog.stop()
        self._core.close()
        if self.dead is None:
            self._die(EngineDead("the engine was shut down"))

    # Requests.

    async def _prepare(
        self,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        request_id: str,
        **more: Any,
    ) -> PendingRequest:
        """more: keywords of `InputProcessor.process`."""
        await self.check_health()
        process = partial(self._input_processor.process, prompt, params, request_id, **more)
        pending: PendingRequest = await _away(prompt, process)
        return pending

    async def _stream(
        self, prepare: Callable[[], Awaitable[PendingRequest]]
    ) -> AsyncGenerator[Any, None]:
        """Submit a request and yield its outputs. Leaving the generator aborts the request."""
        pending = await prepare()
        await self._resumed()
        state, changed = pending.state, asyncio.Event()
        self._loop = asyncio.get_running_loop()
        state.note_weights(self.weight_version)
        self._output_processor.add(state)
        self._requests[state.id] = (state, changed)
        try:
            self._submit(state, pending.requests)
            while not (state.finished and state.end_taken):
                await changed.wait()
                changed.clear()
                if self._gathers(state):
                    continue
                output = state.take()
                if output is not None:
                    yield output
        except QueueFull:
            self._each[0].rejected()
            raise
        finally:
            self._abort(state, changed)
            del self._requests[state.id]
            self._restarts.forget(state)
            self._wake_drain()

    async def _resumed(self) -> None:
        """Wait while the engine is paused, possibly by another front end."""
        self._loop = asyncio.get_running_loop()
        while self._keeps_back(self._core.weights):
            self._running.clear()
            if self._keeps_back(self._core.weights):  # not resumed meanwhile
                await self._running.wait()
        await self.check_health()

    def _submit(self, state: RequestState, requests: Sequence[Request]) -> None:
        if self._core.ranks:
            self._restarts.add(state, requests)
        self._core.submit(requests)

    async def _next_beams(self, search: BeamSearchRequest) -> RequestOutput:
        """Compute the next token of every beam. Raises QueueFull only before the first one."""
        has_started = search.state.cached is not None

        async def prepare() -> PendingRequest:
            return search.next_step(f"{search.state.id}+{next(self._numbers)}")

        while True:
            try:
                async with aclosing(self._stream(prepare)) as outputs:
                    collected: list[RequestOutput] = [output async for output in outputs]
                    return collected[-1]
            except QueueFull:
                if not has_started:
                    raise
                await asyncio.sleep(_AGAIN)

    def _abort_search(self, search: BeamSearchRequest) -> None:
        self._output_processor.abort(search.state)
        for state, changed in list(self._requests.values()):
            if state.parent is search.state:
                self._abort(state, changed)

    def _abort(self, state: RequestState, changed: asyncio.Event) -> None:
        """Abort a request unless it has finished and its end was delivered."""
        if not state.finished or not state.end_taken:
            if self._core.ranks:
                self._count_for(self._core.replica_index(state.ids))
            for identity in self._output_processor.abort(state):
                self._core.abort(identity)
            changed.set()

    def _wake_drain(self) -> None:
        """Wake `drain` if no request is left."""
        if self._idle is not None and not self._requests and not self._beam_searches:
            self._idle.set()

    def _gathers(self, state: RequestState) -> bool:
        """Whether to wait for more tokens before the next output (`--stream-interval`)."""
        if not state.streamed or state.finished:
            return False
        return state.fresh < max(self._interval, state.interval)

    # Called by the engine core, on a thread of its client.

    def _post_death(self, error: EngineDead) -> None:
        self.dead = self.dead or error
        self._post(self.dead)

    def _post_stall(self, error: EngineStalled | None) -> None:
        self.stalled = error
        if error is not None and self._ends_waiting:
            self._core.give_up(error)
            self._post(error)

    def _post_weights(self) -> None:
        self._post(self._core.weights)

    def _post(self, item: _Item) -> None:
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
            if isinstance(item, ReplicaLost):
                self._restart_lost(item)
                continue
            if isinstance(item, ReplicaReady):
                self._wake(self._restarts.submit_postponed())
                continue
            if isinstance(item, WeightState):
                self._weights_news(item)
                continue
            if isinstance(item, ReplicaEvents):
                self._count_for(item.replica)
                item = item.events
            states, stopped = self._output_processor.process(item)
            for identity in stopped:
                self._core.abort(identity)
            self._wake(states)

    def _count_for(self, index: int) -> None:
        """Count statistics for the replica at this index from now on."""
        self._output_processor.statistics = self._each[index]

    def _restart_lost(self, lost: ReplicaLost) -> None:
        """Restart or fail the requests of a dead replica."""
        self._count_for(lost.replica)
        if isinstance(lost.error, EngineDead):
            self._each[lost.replica].forget_now()
        self._wake(self._restarts.handle_lost(lost))

    def _wake(self, states: Sequence[RequestState]) -> None:
        """Wake the callers of requests."""
        for state in states:
            self._requests[state.id][1].set()

    def _weights_news(self, state: WeightState) -> None:
        """Abort requests that must not continue, and start those that waited."""
        for metrics in self._each:
            metrics.set_weight_version(state.weight_version)
            metrics.set_sleep(state.asleep)
        for request, _ in self._requests.values():
            request.note_weights(state.weight_version)
        if state.broken is not None:
            self._end_waiting(EngineStalled(state.broken))
        elif state.paused == "abort":
            for search in list(self._beam_searches.values()):
                self._abort_search(search)
            for request, changed in list(self._requests.values()):
                self._abort(request, changed)
        if not self._keeps_back(state):
            self._running.set()

    def _end_waiting(self, error: EngineStalled) -> None:
        """Fail every request, and abort it in case the engine recovers."""
        for state, _ in list(self._requests.values()):
            for identity in state.ids:
                self._core.abort(identity)
        self._wake(self._output_processor.fail_all(error))

    def _die(self, error: EngineDead) -> None:
        self.dead = error
        self._wake(self._output_processor.fail_all(error))


def _tenant(tenant: Tenant | None) -> dict[str, Any]:
    """The keywords of the input processor for a tenant."""
    return {} if tenant is None else {"tenant": tenant.name, "weight": tenant.weight}


async def _away(prompt: PromptLike, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function directly if the prompt is short, else in a thread."""
    long = isinstance(prompt, str) and len(prompt) > _INLINE
    return await asyncio.to_thread(function, *arguments) if long else function(*arguments)
