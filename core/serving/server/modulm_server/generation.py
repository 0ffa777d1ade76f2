"""Turns the prompts of every API into engine generations.

Renders and tokenizes prompts, and starts generations so that errors are raised before the response
begins. Rejects requests while the server shuts down.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import define, field, frozen

from modulm.contracts.sampling import OutputKind
from modulm.errors import EngineError, EngineStalled, RequestError
from modulm_chat.conversation import encode_chat
from modulm_chat.sandbox import SandboxedRenderer, checkpoint_renderer
from modulm_chat.templates import execute
from modulm_frontend.beam_search import BeamSearchParams
from modulm_server.api_keys import allows
from modulm_server.auth import current_owner, may_use
from modulm_server.engine.client import Tenant
from modulm_server.errors import ApiError, model_error, shutting_down
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field
from modulm_server.key_limits import Caller, current_caller, current_key
from modulm_server.loopback import in_background
from modulm_server.media_service import MediaService
from modulm_server.metrics import ToolCallMetrics
from modulm_server.pacing import Turns
from modulm_server.prompt_embeds import EmbedsParts, read_embeds, refuse_embeds
from modulm_server.prompts import ChatOptions, Prompt
from modulm_server.request_cost import check_cost
from modulm_server.request_log import RequestLog
from modulm_server.running_requests import RunningRequest, current_request
from modulm_server.text_work import TextWork, characters

if TYPE_CHECKING:
    from collections.abc import Callable

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.outputs import PoolingRequestOutput, RequestOutput
    from modulm.contracts.sampling import PoolingParams, SamplingParams
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_media import MediaPrompt
    from modulm_media.messages import MediaSource
    from modulm_server.engine.client import EngineClient
    from modulm_server.media_service import RequestMedia

__all__ = ["GenerationService", "Running", "ServedModel", "abandon", "merged"]

#: Size of a tool in characters, and of work that is slow whatever its length.
_TOOL, _SLOW = 256, 10_000
#: What a further text of a request costs, in characters, however short it is.
_TEXT = 16
#: Prompts of one request that start in one turn of the event loop.
_TOGETHER = 8
#: Maximum length of an adapter name to load.
_NAME = 256
#: Maximum ids that are decoded for a client, unless the model's context is longer.
_MOST_TOKENS = 1 << 18
#: Roles of a first message with which a conversation needs no system message.
_SYSTEM = ("system", "developer")
#: Seconds without an error after which a request counts as accepted.
_ACCEPTED = 1.0
#: Tasks that abort generations.
_ENDING: set[asyncio.Task[None]] = set()


@frozen
class ServedModel:
    """The model of a request. name: shown in responses; adapter: for the engine."""

    name: str
    adapter: str | None = None


@define(eq=False)
class GenerationService:
    """Generation for the routes of all APIs.

    models: the served names of the model; adapters are served under their own names.
    adapter_finders: called in order to load an unknown adapter. media_adapters: kind of media ->
    the adapter of requests that name none. template: the server's chat
    template, in place of the tokenizer's. request_renderer: renders clients' templates; None if
    none are accepted. tenants: API keys do not share the prefix cache. closing: the server is
    shutting down.
    """

    engine: EngineClient
    config: EngineConfig
    models: tuple[str, ...]
    template: str | None = None
    request_renderer: SandboxedRenderer | None = None
    request_log: RequestLog = field(factory=RequestLog)
    tenants: bool = False
    closing: bool = False
    adapter_finders: list[Callable[[str], Awaitable[bool]]] = field(factory=list)
    media_adapters: dict[str, str] = field(factory=dict)
    tool_calls: ToolCallMetrics = field(factory=ToolCallMetrics, init=False)
    work: TextWork = field(init=False)
    _turns: Turns = field(factory=lambda: Turns(_TOGETHER), init=False)
    media: MediaService = field(init=False)

    def __attrs_post_init__(self) -> None:
        threads = self.config.group(ServerConfig).text_threads
        self.work = TextWork(self.engine.tokenizer, self.engine.info.max_model_len, threads)
        self.media = MediaService(self.engine)
        tokenizer = self.engine.tokenizer
        if self.template is None and tokenizer is not None and tokenizer.chat_template:
            checkpoint_renderer().start()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ApiError(400) on a server without one."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ApiError(
                400, "this server has no tokenizer (--skip-tokenizer-init): send token ids"
            )
        return tokenizer

    def model(self, name: Any) -> str:
        """The served name to show in the response; UNSET means the first.

        Raises ApiError(404), also for adapters: use `find_model` for these.
        """
        if not isinstance(name, str):
            return self.models[0]
        if name not in self.models:
            raise model_error(name)
        return name

    async def find_model(self, name: Any) -> ServedModel:
        """Find the model or adapter of a name, loading the adapter if needed.

        UNSET means the first model. Raises ApiError(404), also for a model that the key may not
        use, and errors about an adapter's files.
        """
        shown = name if isinstance(name, str) else self.models[0]
        if not allows(current_key(), shown):
            raise model_error(shown)
        if not isinstance(name, str) or name in self.models:
            return ServedModel(self.model(name))
        if name in self.engine.adapters or await self._load_adapter(name):
            adapter = self.engine.adapters.get(name)
            if adapter is not None and may_use(adapter):
                return ServedModel(name, name)
        raise model_error(name)

    async def _load_adapter(self, name: str) -> bool:
        """Try to load an unknown adapter; returns whether it is available now."""
        if not self.engine.info.limit("adapters", "slots") or len(name) > _NAME:
            return False
        await self.engine.refresh_adapters()
        if name in self.engine.adapters:
            return True
        for finder in self.adapter_finders:
            if await finder(name):
                return True
        return False

    def check_stream(self, streamed: bool | None) -> None:
        """Raise ApiError(429) for a stream beyond the limit of the request's key, before its prompt
        is rendered.
        """
        caller = current_caller()
        if streamed and caller is not None:
            caller.check_stream()

    def check_open(self) -> None:
        """Raise ApiError(503) or EngineStalled if the engine or the server takes no requests."""
        if self.engine.dead:
            raise ApiError(
                503, "the engine has stopped", code="engine_dead", headers={"Retry-After": "10"}
            )
        if self.engine.stalled:
            raise EngineStalled(str(self.engine.stalled))
        if self.closing:
            raise shutting_down()

    async def tokenize(
        self, *texts: str, add_special_tokens: bool = True, whole: bool = False
    ) -> tuple[Prompt, ...]:
        """Tokenize texts into prompts. whole: the texts are not truncated later.

        Raises ContextLengthExceeded for a text that is too long, QueueFull if too much text waits.
        """
        tokenizer = self.tokenizer
        for text in texts:
            self.work.check(len(text))

        def read() -> tuple[Prompt, ...]:
            if whole:
                for text in texts:
                    self.work.check_fits(len(text))
            # An array, because every full garbage collection walks a list of ids.
            return tuple(
                Prompt(array("q", tokenizer.encode(text, add_special_tokens)), text)
                for text in texts
            )

        size = sum(map(len, texts)) + _TEXT * (len(texts) - 1)
        prompts: tuple[Prompt, ...] = await self.work.run(size, read)
        return prompts

    async def from_ids(self, *prompts: Sequence[int]) -> tuple[Prompt, ...]:
        """Prompts of token ids, in arrays if they are integers of 64 bits."""

        def read() -> tuple[Prompt, ...]:
            return tuple(Prompt(_array(ids)) for ids in prompts)

        read_prompts: tuple[Prompt, ...] = await self.work.run(sum(map(len, prompts)), read)
        return read_prompts

    async def text_of(
        self, ids: Sequence[int], field: str, *, skip_special_tokens: bool = False
    ) -> str:
        """Decode token ids that a client sent. Raises ApiError(400) naming the field."""
        size = max(len(self.tokenizer), self.engine.info.vocabulary)
        most = max(_MOST_TOKENS, self.engine.info.max_model_len)
        if len(ids) > most:
            raise bad_field(field, f"{field}: at most {most} are allowed")
        wrong = max(ids, default=0)
        if wrong >= size:
            raise bad_field(field, f"{field}: {wrong} is out of vocabulary (0 to {size - 1})")
        return str(
            await self.work.run(len(ids), self.tokenizer.decode, list(ids), skip_special_tokens)
        )

    async def from_messages(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> Prompt:
        """Render and tokenize messages into a prompt. Raises RequestError naming the field.

        Text of users and tools cannot become control tokens: it is tokenized as text.
        """
        server = self.config.group(ServerConfig)
        template = options.template or self.template
        content = server.chat_template_content_format
        defaults = server.default_chat_template_kwargs or {}
        renderer = self._renderer(options)
        parts = None
        if server.system_prompt and _role(messages) not in _SYSTEM:
            messages = [{"role": "system", "content": server.system_prompt}, *messages]
        messages, media = await self.media.extract(messages, options)
        if EmbedsParts.among(messages):
            refuse_embeds(self.engine.info, "messages")
            parts = EmbedsParts(messages, self.engine.info, self.tokenizer)
        most = 4 * self.work.max_characters
        size = characters(messages, most) + _TOOL * len(options.tools)
        self.work.check(size // 4, "messages")

        def run(source: str, variables: Mapping[str, Any]) -> str:
            text = (execute if renderer is None else renderer.render)(source, variables)
            self.work.check_fits(len(text), "messages")
            return text

        work = self.work.run if renderer is None else self.work.render
        ids, text = await work(
            max(size, _SLOW) if parts or media else size,
            _encode_chat,
            messages if parts is None else parts.messages,
            tokenizer=self.tokenizer,
            encode=None if parts is None else parts.encode,
            add_special_tokens=options.add_special_tokens,
            tools=options.tools or None,
            documents=options.documents,
            template=template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            content=content,
            kwargs={**defaults, **options.variables},
            run=run,
            form=None if renderer is None else renderer.content_format,
        )
        if media is not None:
            if parts is not None:
                raise RequestError("messages: either embeddings or media, not both", "messages")
            filled = await self.media.fill(ids, media, current_owner() if self.tenants else "")
            return Prompt(array("q", filled.tokens.tobytes()), text, media=filled)
        return (
            Prompt(ids, text)
            if parts is None
            else Prompt(ids, parts.without_marks(text), parts.items())
        )

    def _renderer(self, options: ChatOptions) -> SandboxedRenderer | None:
        """The renderer of a conversation's template; None for templates that the server's flags
        name, unless a folder of models has them, and for tokenizers that encode conversations.
        """
        if options.template is not None and self.request_renderer is None:
            raise RequestError(
                "chat_template is not allowed in requests: start the server with "
                "--trust-request-chat-template",
                "chat_template",
            )
        if options.template is not None:
            return self.request_renderer
        trusted = self.template is not None and self.config.value("models_dir") is None
        return None if trusted or self.tokenizer.chat is not None else checkpoint_renderer()

    async def with_media(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[MediaSource]]],
        media: RequestMedia,
    ) -> list[Prompt]:
        """Put the fetched media into prompts of token ids. Raises RequestError."""
        owner = current_owner() if self.tenants else ""
        filled = await self.media.fill_each(prompts, media, owner)
        return [Prompt(array("q", one.tokens.tobytes()), None, media=one) for one in filled]

    async def embeds(self, data: Any) -> Prompt:
        """Read `prompt_embeds`, a base64 tensor, into a prompt. Raises ApiError(400)."""
        size = len(data) if isinstance(data, str) else 0
        item = await self.work.run(size, read_embeds, data, self.engine.info, "prompt_embeds")
        return Prompt([0] * item.length, None, (item,))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Running:
        """Start a generation. adapter: from `find_model`. fields: the API's names of engine
        fields, for errors.

        Returns once the engine has accepted the request, so that errors are raised before the
        response begins.
        """
        await self._turns.wait(current_owner())
        self.check_open()
        server = self.config.group(ServerConfig)
        if server.default_stop:
            params = _stopping(params, server.default_stop)
        check_cost(params, (len(prompt.ids),), self.engine.info, server)
        if adapter is None and self.media_adapters and prompt.media is not None:
            adapter = self._adapter_of(prompt.media)
        streamed = not isinstance(params, BeamSearchParams) and (
            params.output_kind is OutputKind.DELTA
        )
        caller = self._admit(len(prompt.ids), streamed)
        engine_prompt = prompt.engine_prompt()
        name = uuid4().hex
        request = current_request()
        if request is not None:
            request.add_generation(self.engine, name)
        self.request_log.request(name, prompt, params)
        if self.tenants:
            cache_salt = f"{current_owner()}.{cache_salt or ''}"
        priority = _priority(priority)
        more: Any = {"priority": priority, "cache_salt": cache_salt, **_adapter_keyword(adapter)}
        more |= _tenant_keyword(caller)
        if isinstance(params, BeamSearchParams):
            source = self.engine.beam_search(engine_prompt, params, name, **more)
        else:
            source = self.engine.generate(engine_prompt, params, name, **more)

        def note(output: RequestOutput) -> None:
            self.request_log.answer(name, output, delta=streamed)
            if caller is not None and (streamed or output.finished):
                caller.charge(sum(len(choice.token_ids) for choice in output.outputs))

        return await Running.start(source, note, fields or {}, request)

    def _adapter_of(self, media: MediaPrompt) -> str | None:
        """The adapter for a prompt's kinds of media; None unless there is exactly one."""
        kinds = {item.kind for item in media.items}
        adapters = {self.media_adapters[kind] for kind in kinds if kind in self.media_adapters}
        return adapters.pop() if len(adapters) == 1 else None

    def _admit(self, tokens: int, streamed: bool = False) -> Caller | None:
        """Count a prompt for its API key. Raises ApiError(429) beyond the key's limits."""
        caller = current_caller()
        if caller is not None:
            if streamed:
                caller.start_stream()
            caller.check_tokens(tokens)
        return caller

    async def last_outputs(self, runs: Sequence[Running]) -> list[RequestOutput]:
        """Run all to their ends, a few per turn of the event loop; returns their last outputs."""

        async def last(run: Running) -> RequestOutput:
            await self._turns.wait(current_owner())
            return await run.last()

        return await asyncio.gather(*map(last, runs))

    async def encode(
        self,
        prompt: Prompt,
        params: PoolingParams,
        priority: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> PoolingRequestOutput:
        """Pool a prompt. adapter: from `find_model`."""
        await self._turns.wait(current_owner())
        self.check_open()
        caller = self._admit(len(prompt.ids))
        engine_prompt = {**prompt.engine_prompt(), "prompt": None}
        if self.tenants:
            cache_salt = f"{current_owner()}.{cache_salt or ''}"
        salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        more: Any = {**salt, **_adapter_keyword(adapter), **_tenant_keyword(caller)}
        source = self.engine.encode(
            engine_prompt, params, uuid4().hex, priority=_priority(priority), **more
        )
        async with aclosing(source) as outputs:
            results = [output async for output in outputs]
        if not results:
            raise EngineError("the engine returned no output")
        return results[-1]


def _encode_chat(*args: Any, **options: Any) -> tuple[Sequence[int], str]:
    """Encode a conversation, into an array of token ids."""
    ids, text = encode_chat(*args, **options)
    return _array(ids), text


def _array(ids: Sequence[int]) -> Sequence[int]:
    """An array of plain integers, which is checked faster; others as they are, for the check."""
    if set(map(type, ids)) != {int}:
        return ids
    try:
        return array("q", ids)
    except OverflowError:
        return ids


def _role(messages: Sequence[Mapping[str, Any]]) -> Any:
    """The role of the first message."""
    return messages[0].get("role") if messages else None


def _stopping(
    params: SamplingParams | BeamSearchParams, stop: tuple[str, ...]
) -> SamplingParams | BeamSearchParams:
    """Parameters with the server's stop strings, if they have none and yield text."""
    if isinstance(params, BeamSearchParams) or params.stop or not params.detokenize:
        return params
    return params.with_(stop=stop)


def _adapter_keyword(adapter: str | None) -> dict[str, Any]:
    """The keyword for an adapter, left out without one for engines that do not know it."""
    return {} if adapter is None else {"adapter": adapter}


def _priority(priority: int) -> int:
    """The priority for the scheduler: lines of batches make room for other requests."""
    return max(priority, 1) if in_background() else priority


def _tenant_keyword(caller: Caller | None) -> dict[str, Any]:
    """The keyword for the tenant of a request, left out on a server without keys."""
    if caller is None:
        return {}
    return {"tenant": Tenant(caller.key.owner, caller.key.weight)}


def abandon(starting: Iterable[asyncio.Task[Running]]) -> None:
    """Abort generations that start, or have started. It needs no turn of the caller, which may be
    cancelled again.
    """
    for task in starting:
        task.cancel()
        task.add_done_callback(_abort)


def _abort(started: asyncio.Task[Running]) -> None:
    if started.cancelled() or started.exception() is not None:
        return
    ending = asyncio.ensure_future(started.result().aclose())
    _ENDING.add(ending)
    ending.add_done_callback(_ENDING.discard)


class Running:
    """A generation in progress: iterate it once; `aclose` aborts it.

    Failed outputs are raised as errors. fields: the API's names of engine fields, which replace
    those in errors. log: called with every output. request: of the client; one that was aborted by
    its id ends without an error.
    """

    def __init__(
        self,
        source: AsyncGenerator[RequestOutput, None],
        log: Callable[[RequestOutput], None],
        fields: Mapping[str, str],
        request: RunningRequest | None = None,
    ) -> None:
        self._source = source
        self._request = request
        self._log = log
        self._fields = fields
        self._first: asyncio.Future[RequestOutput | None] | None
        self._first = asyncio.ensure_future(anext(source, None))

    @classmethod
    async def start(
        cls,
        source: AsyncGenerator[RequestOutput, None],
        log: Callable[[RequestOutput], None],
        fields: Mapping[str, str],
        request: RunningRequest | None = None,
    ) -> Running:
        """Start and wait for the first output. Raises if the engine rejects the request.

        A request that waits longer in the queue counts as accepted.
        """
        running = cls(source, log, fields, request)
        first = running._first
        try:
            if (
                first is not None
                and await asyncio.wait({first}, timeout=_ACCEPTED)
                and first.done()
            ):
                output = first.result()
                if output is not None:
                    running._check_ends(output)
        except RequestError as error:
            await running.aclose()
            raise running._renamed(error) from error.__cause__
        except BaseException:
            await running.aclose()
            raise
        return running

    def __del__(self) -> None:
        """Abort a generation that nobody reads, also if its reader was cancelled early."""
        first = self._first
        if first is not None and not first.done() and not first.get_loop().is_closed():
            first.get_loop().call_soon_threadsafe(first.cancel)

    def __aiter__(self) -> Running:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            if self._first is None:
                output = await anext(self._source)
            else:
                first = await self._first
                self._first = None
                if first is None:
                    raise StopAsyncIteration
                output = first
            self._check_ends(output)
        except RequestError as error:
            raise self._renamed(error) from error.__cause__
        self._log(output)
        return output

    async def aclose(self) -> None:
        """Abort the generation."""
        if self._first is not None:
            self._first.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._first
        await self._source.aclose()

    async def last(self) -> RequestOutput:
        """Run to the end; returns the last output."""
        async with aclosing(self):
            results = [output async for output in self]
        if not results:
            raise EngineError("the engine returned no output")
        return results[-1]

    def _check_ends(self, output: RequestOutput) -> None:
        """Raise if a choice failed in the engine or was aborted by the server."""
        for choice in output.outputs:
            if choice.finish_reason == "error":
                raise EngineError(str(choice.stop_reason))
            if choice.finish_reason == "abort" and not (self._request and self._request.aborted):
                raise ApiError(503, "the server ended this request", code="shutting_down")

    def _renamed(self, error: RequestError) -> RequestError:
        """Replace the engine's field name in an error by the client's."""
        if field_name := self._fields.get(error.param or ""):
            kind = field_name.removeprefix("guided_")  # guided_regex is structured_outputs.regex
            for own in (f"{error.param}.{kind}", str(error.param)):
                error.message = error.message.replace(own, field_name, 1)
            error.args, error.param = (error.message,), field_name
        return error


async def merged(runs: Sequence[AsyncIterator[Any]]) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield (index of the iterator, item) for the items of several iterators, as they come."""
    waiting = {asyncio.ensure_future(_next(run)): index for index, run in enumerate(runs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                for item in task.result():
                    waiting[asyncio.ensure_future(_next(runs[index]))] = index
                    yield index, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(run: AsyncIterator[Any]) -> list[Any]:
    """The next item in a list, or an empty one at the end."""
    try:
        return [await anext(run)]
    except StopAsyncIteration:
        return []
