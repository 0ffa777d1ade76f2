"""AsyncLLM: many callers on an event loop, one engine beside it.

The engine runs in a thread or in a process of its own (`process.py`); here is the side that
tokenizes, turns tokens into text and hands it out. A caller that reads slowly finds what came
meanwhile merged into one output; a caller that goes away takes its request with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from modulm.config.sources import keywords
from modulm.contracts.requests import StepEvents, StepStats
from modulm.contracts.sampling import LogitsProcessor, PoolingParams, SamplingParams
from modulm.engine.client.core_client import EngineCoreClient, ThreadCoreClient
from modulm.engine.frontend.input_processor import InputProcessor, PromptLike, Search, Work
from modulm.engine.frontend.metrics import Metrics
from modulm.engine.frontend.output_processor import OutputProcessor, RequestState
from modulm.engine.types.outputs import PoolingRequestOutput, RequestOutput
from modulm.errors import EngineDead, NotFound, QueueFull, RequestError
from modulm.plugins import manager

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.engine.client.spawn import EngineProcess
    from modulm.engine.frontend.beam_search import BeamSearchParams
    from modulm.text.tokenizer import Tokenizer

__all__ = ["AsyncLLM"]

#: Seconds until a search that was accepted asks again after it found the queue full.
_AGAIN = 0.05
#: Characters up to which a prompt is tokenized on the event loop: a thread costs more than that.
_INLINE = 20_000


class AsyncLLM:
    """An engine for servers.

    Keywords are the flags of `modulm serve` with underscores. Use it from one event loop.
    Raises ConfigError, CheckpointError or PluginError where it cannot start.
    """

    def __init__(self, model: str = "demo", **flags: Any) -> None:
        self._open(keywords(model=model, **flags).config)

    @classmethod
    def from_config(cls, config: EngineConfig, process: EngineProcess | None = None) -> AsyncLLM:
        """An engine of a configuration that is complete; in `process`, if one waits for work."""
        made = cls.__new__(cls)
        made._open(config, process)
        return made

    @classmethod
    def connect(cls, address: str) -> AsyncLLM:
        """A further front end of an engine that runs in a process (`EngineProcess.address`)."""
        from modulm.engine.client.process import ProcessCoreClient

        made = cls.__new__(cls)
        made._begin()
        made._attach(ProcessCoreClient(address, made._hear, made._hear_death))
        return made

    def _open(self, config: EngineConfig, process: EngineProcess | None = None) -> None:
        self._begin()
        plugins = manager.current()
        if config.parallel.disable_frontend_multiprocessing:
            self._attach(ThreadCoreClient(config, plugins, self._hear, self._hear_death))
            return
        from modulm.engine.client.process import ProcessCoreClient
        from modulm.engine.client.spawn import EngineProcess

        engine = process or EngineProcess()
        engine.start(config, plugins)
        self._attach(ProcessCoreClient(engine.address, self._hear, self._hear_death, engine))

    def _begin(self) -> None:
        self.dead: EngineDead | None = None
        self._heard: deque[StepEvents | EngineDead] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open_answers: dict[str, tuple[RequestState, asyncio.Event]] = {}
        self._searches: dict[str, Search] = {}
        self._numbers = count()
        self._idle: asyncio.Event | None = None

    def _attach(self, line: EngineCoreClient) -> None:
        self._line = line
        self.info = info = line.info
        self.tokenizer = line.tokenizer()
        self.metrics = Metrics(info.models[0])
        self._preparer = InputProcessor(info, self.tokenizer, _processors(info.config), line.number)
        self._answers = OutputProcessor(self.metrics)
        self._interval = info.config.scheduler.stream_interval

    # What callers ask.

    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, by `params.output_kind`; the last one has `finished`.

        Leaving early aborts the request. Raises RequestError if the request is wrong, QueueFull if
        it cannot wait, EngineDead. What goes wrong while it runs is in `finish_reason`.
        """
        work = await self._prepare(prompt, params, request_id, priority, cache_salt)
        async for output in self._follow(work):
            yield output

    async def beam_search(
        self,
        prompt: PromptLike,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """One output with the `params.beam_width` best answers, best first.

        Leaving early ends the search. Raises as `generate` does.
        """
        await self.check_health()
        search = self._preparer.search(
            prompt, params, request_id, priority=priority, cache_salt=cache_salt
        )
        if request_id in self._searches or request_id in self._open_answers:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        self._searches[request_id] = search
        try:
            while search.going:
                search.feed(await self._ask(search))
        finally:
            del self._searches[request_id]
            self._answers.count(search.answer)
            self._rest()
        output = search.answer.take()
        if isinstance(output, RequestOutput):
            yield output

    async def encode(
        self,
        prompt: PromptLike,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """One output, when it is there. Raises as `generate` does."""
        job = await _away(prompt, self._preparer.job, prompt, params)
        found: list[PoolingRequestOutput] = []
        for place, (ids, own) in enumerate(job.parts):
            name = f"{request_id}.{place}" if place else request_id
            work = await self._prepare(ids, own, name, priority, None)
            found += [output async for output in self._follow(work)]
        for output in job.join(found):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request now; whoever reads it gets its last output. Unknown ones are ignored."""
        found = self._open_answers.get(request_id)
        if found is not None:
            self._end(*found)
        search = self._searches.get(request_id)
        if search is not None:
            self._end_search(search)

    async def check_health(self) -> None:
        """Raise EngineDead if the engine cannot go on."""
        if self.dead is not None:
            raise self.dead

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until no request is left, at most `timeout` seconds; what is left is aborted."""
        self._idle = asyncio.Event()
        try:
            if self.active:
                await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for search in list(self._searches.values()):
                self._end_search(search)
            for answer, news in list(self._open_answers.values()):
                self._end(answer, news)
            return False
        finally:
            self._idle = None
        return True

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; running requests go on."""
        await self._call("reset_prefix_cache")
        return True

    async def sleep(self, level: int = 1) -> None:
        """Give back the memory of the caches, with level 2 that of the weights as well.

        Requests are refused until it is woken. Raises UnsupportedError without
        --enable-sleep-mode, RequestError while requests run.
        """
        await self._call("sleep", level)

    async def wake_up(self) -> None:
        """Take the memory again; weights that were given back are loaded anew."""
        await self._call("wake_up")

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return bool(await self._call("is_sleeping"))

    def report_by(self, report: Callable[[], str]) -> None:
        """How this front end tells of itself, on any thread, when another one asks."""
        self._line.report = report

    async def reports(self) -> list[str]:
        """What the engine's other front ends tell of themselves."""
        return await asyncio.wrap_future(self._line.reports())

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises NotFound if there is none."""
        if self.tokenizer is None:
            raise NotFound("there is no tokenizer: skip_tokenizer_init was given")
        return self.tokenizer

    @property
    def address(self) -> str | None:
        """Where further front ends connect to the same engine; None if it has no process."""
        return self._line.address

    @property
    def stats(self) -> StepStats | None:
        """The last step in numbers; None before the first."""
        return self.metrics.last

    @property
    def active(self) -> int:
        """Requests that have not ended; a beam search and what it asks for count as two."""
        return len(self._open_answers) + len(self._searches)

    def shutdown(self) -> None:
        """Stop the engine; requests that are left end with EngineDead. May be called twice."""
        self._line.close()
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
    ) -> Work:
        await self.check_health()
        make = partial(
            self._preparer.work,
            prompt,
            params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        work: Work = await _away(prompt, make)
        return work

    async def _follow(self, work: Work) -> AsyncGenerator[Any, None]:
        """Run the work and give its outputs; whatever ends this ends the work."""
        answer, news = work.answer, asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._answers.open(answer)
        self._open_answers[answer.id] = (answer, news)
        try:
            self._line.submit(work.requests)
            while not (answer.finished and answer.told):
                await news.wait()
                news.clear()
                if self._gathers(answer):
                    continue
                output = answer.take()
                if output is not None:
                    yield output
        finally:
            self._end(answer, news)
            del self._open_answers[answer.id]
            self._rest()

    async def _ask(self, search: Search) -> RequestOutput:
        """The next token of every beam. A full queue refuses a search only at its beginning."""
        begun = search.answer.cached is not None
        while True:
            try:
                work = search.ask(f"{search.answer.id}+{next(self._numbers)}")
                async with aclosing(self._follow(work)) as outputs:
                    found: list[RequestOutput] = [output async for output in outputs]
                    return found[-1]
            except QueueFull:
                if not begun:
                    raise
                await asyncio.sleep(_AGAIN)

    def _end_search(self, search: Search) -> None:
        self._answers.abort(search.answer)
        for answer, news in list(self._open_answers.values()):
            if answer.parent is search.answer:
                self._end(answer, news)

    def _rest(self) -> None:
        """Tell who waits for it that nothing is left."""
        if self._idle is not None and not self.active:
            self._idle.set()

    def _gathers(self, answer: RequestState) -> bool:
        """Whether to wait for more tokens before the next output (`--stream-interval`)."""
        return answer.streamed and not answer.finished and answer.fresh < self._interval

    def _end(self, answer: RequestState, news: asyncio.Event) -> None:
        if not answer.finished or not answer.told:
            for identity in self._answers.abort(answer):
                self._line.abort(identity)
            news.set()

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._line.call(name, *arguments))

    # What the engine tells, on its thread.

    def _hear(self, events: StepEvents) -> None:
        self._post(events)

    def _hear_death(self, error: EngineDead) -> None:
        self.dead = error
        self._post(error)

    def _post(self, item: StepEvents | EngineDead) -> None:
        self._heard.append(item)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._listen)

    # The same, on the event loop.

    def _listen(self) -> None:
        while self._heard:
            item = self._heard.popleft()
            if isinstance(item, EngineDead):
                self._die(item)
                continue
            answers, stopped = self._answers.feed(item)
            for identity in stopped:
                self._line.abort(identity)
            for answer in answers:
                self._open_answers[answer.id][1].set()

    def _die(self, error: EngineDead) -> None:
        self.dead = error
        for answer in self._answers.fail_all(error):
            self._open_answers[answer.id][1].set()


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
