"""Turns prompts of every API into generations of the engine.

Renders and tokenizes prompts, starts generations so that a refusal is known before an answer
begins, and says no while the server is going down.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import define, field, frozen

from modulm.contracts.sampling import OutputKind
from modulm.errors import EngineError, EngineStalled, RequestError
from modulm_chat.conversation import ContentFormat, content_format, encode_chat
from modulm_chat.templates import execute
from modulm_frontend.beam_search import BeamSearchParams
from modulm_server.auth import current_owner
from modulm_server.errors import ApiError, model_error
from modulm_server.flags import ServerConfig
from modulm_server.media import MediaWork
from modulm_server.prompt_embeds import EmbedsParts, read_embeds, refuse_embeds
from modulm_server.prompts import ChatOptions, Prompt
from modulm_server.request_cost import check_cost
from modulm_server.request_log import RequestLog
from modulm_server.text_work import TextWork, characters

if TYPE_CHECKING:
    from collections.abc import Callable

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.outputs import PoolingRequestOutput, RequestOutput
    from modulm.contracts.sampling import PoolingParams, SamplingParams
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_media.messages import MediaSource
    from modulm_server.engine.client import EngineClient
    from modulm_server.media import TakenMedia

__all__ = ["GenerationService", "Running", "ServedModel", "merged"]

#: What a tool counts in characters, and what takes long whatever its length.
_TOOL, _SLOW = 256, 10_000
#: Most characters of a name that is looked for.
_NAME = 256
#: Seconds after which a request that was not refused counts as accepted.
_ACCEPTED = 1.0


@frozen
class ServedModel:
    """What a request's `model` stands for. name: shown in answers; adapter: for the engine."""

    name: str
    adapter: str | None = None


@define(eq=False)
class GenerationService:
    """What the routes of all APIs share.

    models: names of the model, beside which the engine's adapters are served under theirs. finders:
    are asked, one after the other, to load an adapter that is not there. template: the server's own
    chat template, in place of the tokenizer's. render_untrusted, format_untrusted: render templates
    that clients send, and say which content they want. tenants: keys share no prefixes. closing:
    the server is going down.
    """

    engine: EngineClient
    config: EngineConfig
    models: tuple[str, ...]
    template: str | None = None
    render_untrusted: Callable[[str, Mapping[str, Any]], str] = execute
    format_untrusted: Callable[[str], ContentFormat] = content_format
    request_log: RequestLog = field(factory=RequestLog)
    tenants: bool = False
    closing: bool = False
    finders: list[Callable[[str], Awaitable[bool]]] = field(factory=list)
    work: TextWork = field(init=False)
    media: MediaWork = field(init=False)

    def __attrs_post_init__(self) -> None:
        threads = self.config.group(ServerConfig).text_threads
        self.work = TextWork(self.engine.tokenizer, self.engine.info.max_model_len, threads)
        self.media = MediaWork(self.engine)

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
        """The name to show in the answer; UNSET means the first. Raises ApiError(404), also for
        adapters, which `find_model` finds.
        """
        if not isinstance(name, str):
            return self.models[0]
        if name not in self.models:
            raise model_error(name)
        return name

    async def find_model(self, name: Any) -> ServedModel:
        """The model or adapter of this name, loaded if need be. UNSET means the first model.

        Raises ApiError(404), and what is wrong with an adapter's files.
        """
        if not isinstance(name, str) or name in self.models:
            return ServedModel(self.model(name))
        if name in self.engine.adapters or await self._found(name):
            return ServedModel(name, name)
        raise model_error(name)

    async def _found(self, name: str) -> bool:
        """Whether an adapter that is not there is there now."""
        if not self.engine.info.limit("adapters", "slots") or len(name) > _NAME:
            return False
        await self.engine.refresh_adapters()
        if name in self.engine.adapters:
            return True
        for finder in self.finders:
            if await finder(name):
                return True
        return False

    def check_open(self) -> None:
        """Raise ApiError(503) or EngineStalled while no engine works or the server goes down."""
        if self.engine.dead:
            raise ApiError(
                503, "the engine has stopped", code="engine_dead", headers={"Retry-After": "10"}
            )
        if self.engine.stalled:
            raise EngineStalled(str(self.engine.stalled))
        if self.closing:
            raise ApiError(
                503,
                "the server is shutting down",
                code="shutting_down",
                headers={"Retry-After": "10", "Connection": "close"},
            )

    async def tokenize(
        self, *texts: str, add_special_tokens: bool = True, whole: bool = False
    ) -> tuple[Prompt, ...]:
        """Texts as prompts. whole: they will not be cut, so that they must fit into the context.

        Raises ContextLengthExceeded for one that is too long to be looked at, QueueFull if too
        much text waits already.
        """
        tokenizer = self.tokenizer
        for text in texts:
            self.work.check(len(text))

        def read() -> tuple[Prompt, ...]:
            if whole:
                for text in texts:
                    self.work.check_fits(len(text))
            # A list of ids is looked through by every full collection of garbage, an array is not.
            return tuple(
                Prompt(array("q", tokenizer.encode(text, add_special_tokens)), text)
                for text in texts
            )

        prompts: tuple[Prompt, ...] = await self.work.run(sum(map(len, texts)), read)
        return prompts

    async def from_messages(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> Prompt:
        """Messages as a prompt. Raises RequestError naming the field to blame.

        What users and tools say cannot become control tokens: it is tokenized as text.
        """
        server = self.config.group(ServerConfig)
        template = options.template or self.template
        wanted = server.chat_template_content_format
        defaults = server.default_chat_template_kwargs or {}
        untrusted = options.template is not None
        parts = None
        messages, taken = await self.media.take(messages, options)
        if EmbedsParts.among(messages):
            refuse_embeds(self.engine.info, "messages")
            parts = EmbedsParts(messages, self.engine.info, self.tokenizer)
        most = 4 * self.work.most
        size = characters(messages, most) + _TOOL * len(options.tools)
        self.work.check(size // 4, "messages")

        def run(source: str, variables: Mapping[str, Any]) -> str:
            text = (self.render_untrusted if untrusted else execute)(source, variables)
            self.work.check_fits(len(text), "messages")
            return text

        ids, text = await self.work.run(
            max(size, _SLOW) if untrusted or parts or taken else size,
            encode_chat,
            messages if parts is None else parts.messages,
            tokenizer=self.tokenizer,
            encode=None if parts is None else parts.encode,
            add_special_tokens=options.add_special_tokens,
            tools=options.tools or None,
            documents=options.documents,
            template=template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            content=wanted,
            kwargs={**defaults, **options.variables},
            run=run,
            form=self.format_untrusted if untrusted else None,
        )
        if taken is not None:
            if parts is not None:
                raise RequestError("messages: either embeddings or media, not both", "messages")
            filled = await self.media.fill(ids, taken, current_owner() if self.tenants else "")
            return Prompt(array("q", filled.tokens.tobytes()), text, media=filled)
        return Prompt(ids, text) if parts is None else Prompt(ids, parts.shown(text), parts.items())

    async def with_media(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[MediaSource]]],
        taken: TakenMedia,
    ) -> list[Prompt]:
        """Prompts of token ids with what their media become. Raises RequestError."""
        owner = current_owner() if self.tenants else ""
        found = await self.media.fill_each(prompts, taken, owner)
        return [Prompt(array("q", one.tokens.tobytes()), None, media=one) for one in found]

    async def embeds(self, given: Any) -> Prompt:
        """`prompt_embeds`, a tensor in base64, as a prompt. Raises ApiError(400)."""
        size = len(given) if isinstance(given, str) else 0
        item = await self.work.run(size, read_embeds, given, self.engine.info, "prompt_embeds")
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
        """A running generation. adapter: of `find_model`. fields: what the API calls a field of
        the engine's, in errors.

        It returns when the engine has accepted the request, so that what is wrong with it is
        raised here, before an answer has begun.
        """
        self.check_open()
        check_cost(params, (len(prompt.ids),), self.engine.info, self.config.group(ServerConfig))
        given = prompt.given()
        name = uuid4().hex
        self.request_log.request(name, prompt, params)
        if self.tenants:
            cache_salt = f"{current_owner()}.{cache_salt or ''}"
        more: Any = {"priority": priority, "cache_salt": cache_salt, **_named(adapter)}
        if isinstance(params, BeamSearchParams):
            streamed = False
            source = self.engine.beam_search(given, params, name, **more)
        else:
            streamed = params.output_kind is OutputKind.DELTA
            source = self.engine.generate(given, params, name, **more)
        log = partial(self.request_log.answer, name, delta=streamed)
        return await Running.start(source, log, fields or {})

    async def encode(
        self, prompt: Prompt, params: PoolingParams, priority: int = 0, adapter: str | None = None
    ) -> PoolingRequestOutput:
        """The pooled output of a prompt. adapter: of `find_model`."""
        self.check_open()
        given = {**prompt.given(), "prompt": None}
        more = _named(adapter)
        source = self.engine.encode(given, params, uuid4().hex, priority=priority, **more)
        async with aclosing(source) as outputs:
            found = [output async for output in outputs]
        if not found:
            raise EngineError("the engine gave no output")
        return found[-1]


def _named(adapter: str | None) -> dict[str, Any]:
    """The keyword for an adapter; engines that take none need not know it."""
    return {} if adapter is None else {"adapter": adapter}


class Running:
    """A generation in progress: iterate it once; `aclose` ends it at once.

    Outputs that are no answers (what the engine could not finish) are raised; an error about one
    of `fields` speaks of it as the client does. log: gets every output.
    """

    def __init__(
        self,
        source: AsyncGenerator[RequestOutput, None],
        log: Callable[[RequestOutput], None],
        fields: Mapping[str, str],
    ) -> None:
        self._source = source
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
    ) -> Running:
        """Wait for the first output, for a moment. Raises what the engine has against the request.

        A request that waits its turn for longer has been accepted; its answer may begin.
        """
        running = cls(source, log, fields)
        first = running._first
        try:
            if (
                first is not None
                and await asyncio.wait({first}, timeout=_ACCEPTED)
                and first.done()
            ):
                output = first.result()
                if output is not None:
                    _check_ends(output)
        except RequestError as error:
            await running.aclose()
            raise running._renamed(error) from error.__cause__
        except BaseException:
            await running.aclose()
            raise
        return running

    def __del__(self) -> None:
        """Nobody will read it: it ends, also where its reader was cancelled before it began."""
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
            _check_ends(output)
        except RequestError as error:
            raise self._renamed(error) from error.__cause__
        self._log(output)
        return output

    async def aclose(self) -> None:
        """Abort what is left."""
        if self._first is not None:
            self._first.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._first
        await self._source.aclose()

    async def last(self) -> RequestOutput:
        """The last output, when all is done."""
        async with aclosing(self):
            found = [output async for output in self]
        if not found:
            raise EngineError("the engine gave no output")
        return found[-1]

    def _renamed(self, error: RequestError) -> RequestError:
        """The error, with the client's name of the field that it is about."""
        if own := self._fields.get(error.param or ""):
            error.message = error.message.replace(error.param or "", own, 1)
            error.args, error.param = (error.message,), own
        return error


def _check_ends(output: RequestOutput) -> None:
    """Raise for an answer that the engine could not finish, or that the server cut short."""
    for choice in output.outputs:
        if choice.finish_reason == "error":
            raise EngineError(str(choice.stop_reason))
        if choice.finish_reason == "abort":
            raise ApiError(503, "the server ended this request", code="shutting_down")


async def merged(runs: Sequence[AsyncIterator[Any]]) -> AsyncGenerator[tuple[int, Any], None]:
    """The items of several iterators as they come, with the place of each's source."""
    waiting = {asyncio.ensure_future(_next(run)): place for place, run in enumerate(runs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place = waiting.pop(task)
                for item in task.result():
                    waiting[asyncio.ensure_future(_next(runs[place]))] = place
                    yield place, item
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
