"""The route family of Anthropic's messages API."""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from attrs import frozen
from fastapi import APIRouter, Request
from msgspec import structs
from starlette.responses import Response

from modulm_prefix_retention import Mark, with_marks
from modulm_route_anthropic.caching import breakpoints_of
from modulm_route_anthropic.events import Events, blocks_of, stop_of, usage_of, written
from modulm_route_anthropic.flags import AnthropicConfig
from modulm_route_anthropic.objects import (
    Failure,
    Message,
    Opening,
    StreamEvent,
    TokenCount,
    WholeMessage,
)
from modulm_route_anthropic.schema import (
    CountRequest,
    MessagesRequest,
    budget_of,
    constraint_of,
    messages_of,
    params_of,
    shows_thinking,
    tools_of,
    variables_of,
)
from modulm_route_anthropic.tool_servers import hosted_tools_of
from modulm_server.chat_turn import ChatTurn, Parsers
from modulm_server.errors import error_body
from modulm_server.flags import ServerConfig
from modulm_server.forced_calls import ForcedCalls, force_calls
from modulm_server.hosted_turns import HostedTurns, Step
from modulm_server.json_body import convert, json_response, read, request_docs
from modulm_server.key_limits import current_key, rate_headers
from modulm_server.openapi import response_docs
from modulm_server.prompt_caching import cache_time, creation_tokens, marks_at
from modulm_server.prompts import ChatOptions
from modulm_server.rendering import Rendered, rendered
from modulm_server.route import RouteFamily
from modulm_server.sse import EventStream, event
from modulm_server.tool_servers import ToolServers
from modulm_server.transfer import transferred

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

    from modulm.contracts.outputs import RequestOutput
    from modulm_route_anthropic.objects import Event as BlockEvent
    from modulm_route_anthropic.objects import Usage
    from modulm_server.chat_turn import RunningTurn
    from modulm_server.errors import ApiError
    from modulm_server.hosted_tools import HostedTools
    from modulm_server.key_limits import Rate
    from modulm_server.transfer import Transferred

__all__ = ["Anthropic"]


@frozen
class _Job:
    """A validated request.

    messages: of its conversation, in the chat API's form. hosted: tools that the server runs.
    """

    id: str
    model: str
    body: MessagesRequest
    messages: Sequence[dict[str, Any]]
    hosted: HostedTools
    turn: ChatTurn
    single: bool
    omitted: bool


class Anthropic(RouteFamily):
    """`/v1/messages`, `/v1/messages/count_tokens` and `/v1/messages/render`."""

    name = "anthropic"
    api = 2

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/messages", tags=["Anthropic"])
        self._parsers = Parsers.of(self.context.config)
        thinking = self.context.config.group(AnthropicConfig)
        self._disabled_effort = thinking.anthropic_disabled_thinking_effort
        flags = self.context.config.group(ServerConfig)
        self._tool_servers = ToolServers.shared(self.context.stores, flags)
        router.add_api_route(
            "",
            self.with_errors(self.create),
            methods=["POST"],
            openapi_extra=request_docs(MessagesRequest),
            responses=response_docs(WholeMessage, events=StreamEvent, failure=Failure),
        )
        router.add_api_route(
            "/count_tokens",
            self.with_errors(self.count),
            methods=["POST"],
            openapi_extra=request_docs(CountRequest),
            responses=response_docs(TokenCount, failure=Failure),
        )
        router.add_api_route(
            "/render",
            self.with_errors(self.render),
            methods=["POST"],
            openapi_extra=request_docs(MessagesRequest),
            responses=response_docs(Rendered, failure=Failure),
        )
        return router

    def error_response(self, error: ApiError) -> Response:
        return json_response(_error(error), error.status, error.headers)

    def error_frames(self, body: bytes) -> bytes:
        return b"event: error\ndata: " + body + b"\n\n"

    def rate_headers(self, rates: Iterable[Rate]) -> Iterator[tuple[bytes, bytes]]:
        """With OpenAI's names, and Anthropic's."""
        now = datetime.now(UTC).replace(microsecond=0)
        for rate in rates:
            yield from rate_headers((rate,))
            reset = (now + timedelta(seconds=rate.reset)).isoformat().replace("+00:00", "Z")
            values = (("limit", rate.limit), ("remaining", rate.remaining), ("reset", reset))
            for name, value in values:
                yield f"anthropic-ratelimit-{rate.kind}-{name}".encode(), str(value).encode()

    async def create(self, request: Request) -> Response:
        """Generate the next message of a conversation."""
        body = await read(request, MessagesRequest)
        job = await self._job(request, body)
        started = await job.turn.start()
        if body.stream:
            quiet = self.context.config.group(ServerConfig).sse_keep_alive_interval
            return EventStream(self._frames(request, job, started), quiet=quiet, failed=_failed)
        return json_response(await self._whole(request, job, started))

    async def render(self, request: Request) -> Response:
        """Render a conversation into an engine request, without running it."""
        body = await read(request, MessagesRequest)
        job = await self._job(request, body)
        turn, tokenizer = job.turn, self.context.generation.tokenizer
        return json_response(
            rendered(
                job.id, job.model, turn.prompt, turn.engine_params(), tokenizer,
                stream=body.stream, cache_salt=body.cache_salt,
            )
        )  # fmt: skip

    async def count(self, request: Request) -> Response:
        """Count the tokens of a conversation."""
        body = await read(request, CountRequest)
        await self.context.generation.find_model(body.model)
        hosted = await hosted_tools_of(body, self._tool_servers, current_key())
        tools, choice, parallel = tools_of(body, hosted.functions)
        constraint_of(body, self._forced_calls(tools, choice, parallel))
        variables = variables_of(body, self._parsers.reasoning, self._disabled_effort)
        options = ChatOptions(tools=tools, variables=variables)
        messages = await convert(request, messages_of, body, hosted.model_name)
        prompt = await self.context.generation.from_messages(messages, options)
        counted: TokenCount = {"input_tokens": len(prompt.ids)}
        return json_response(counted)

    def failure(self, error: ApiError) -> Failure:
        """See `RouteFamily.failure`."""
        return _error(error)

    async def stop(self) -> None:
        """End the sessions with tool servers."""
        if self.context.front:
            await self._tool_servers.close()

    async def _job(self, request: Request, body: MessagesRequest) -> _Job:
        generation = self.context.generation
        model = await generation.find_model(body.model)
        generation.check_open()
        hosted = await hosted_tools_of(body, self._tool_servers, current_key())
        messages = await convert(request, messages_of, body, hosted.model_name)
        turn, parallel = await self._turn(request, body, messages, hosted, model.adapter)
        return _Job(
            id=f"msg_{request.scope['modulm.id']}",
            model=model.name,
            body=body,
            messages=messages,
            hosted=hosted,
            turn=turn,
            single=not parallel,
            omitted=(body.thinking or {}).get("display") == "omitted",
        )

    async def _turn(
        self,
        request: Request,
        body: MessagesRequest,
        messages: Sequence[dict[str, Any]],
        hosted: HostedTools,
        adapter: str | None,
    ) -> tuple[ChatTurn, bool]:
        """Render a turn; returns (the turn, whether its calls may be parallel)."""
        generation = self.context.generation
        tools, choice, parallel = tools_of(body, hosted.functions)
        variables = variables_of(body, self._parsers.reasoning, self._disabled_effort)
        forced_calls = self._forced_calls(tools, choice, parallel)
        constraint = constraint_of(body, forced_calls)
        breakpoints = await convert(request, breakpoints_of, body)
        options = ChatOptions(tools=tools, variables=variables)
        prompt = await generation.from_messages(messages, options)
        marks = await marks_at(generation.tokenizer, generation.work, prompt, breakpoints)
        if (seconds := cache_time("cache_control", "", body.cache_control)) is not None:
            marks.append(Mark(len(prompt.ids), seconds))
        params = params_of(
            body,
            self.context.engine.info.defaults,
            None if constraint is None else constraint[1],
            self._budget(body),
        )
        turn = ChatTurn(
            api="messages",
            generation=generation,
            prompt=prompt,
            params=with_marks(params, marks),
            parsers=self._parsers,
            tools=tools,
            tool_choice=choice,
            calls_by_grammar=forced_calls.in_model_format,
            reasoning=shows_thinking(body),
            template_kwargs=variables,
            cache_salt=body.cache_salt,
            fields={
                "thinking_token_budget": "thinking",
                "stop": "stop_sequences",
                "prompt": "messages",
                "structured_outputs": constraint[0] if constraint else "",
            },
            adapter=adapter,
        )
        turn.check()
        return turn, parallel

    def _hosted_turns(self, request: Request, job: _Job, started: RunningTurn) -> HostedTurns:
        """The answer to a request with tools that the server runs."""
        body = structs.replace(job.body, tool_choice=None)

        async def next_turn(more: list[dict[str, Any]]) -> ChatTurn:
            messages = [*job.messages, *more]
            turn, _ = await self._turn(request, body, messages, job.hosted, job.turn.adapter)
            return turn

        limit = self.context.config.group(ServerConfig).tool_calls
        return HostedTurns(started, job.hosted, limit, next_turn, single=job.single)

    def _budget(self, body: MessagesRequest) -> int | None:
        """The thinking budget; None without a reasoning parser, which counts the tokens."""
        return budget_of(body) if self._parsers.reasoning else None

    def _forced_calls(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, parallel: bool
    ) -> ForcedCalls:
        tokenizer = self.context.generation.tokenizer
        return force_calls(choice, tools, self._parsers, tokenizer, parallel=parallel)

    async def _whole(self, request: Request, job: _Job, started: RunningTurn) -> WholeMessage:
        events = Events(job.single, job.omitted)
        if job.hosted.by_name:
            turns = self._hosted_turns(request, job, started)
            sent: list[BlockEvent] = []
            there: Transferred = {}
            created: dict[int, int] = {}
            reason: str | None = None
            stop: int | str | None = None
            async with aclosing(turns.steps()) as steps:
                async for step in steps:
                    created = creation_tokens(step.output) or created
                    there = transferred(step.output)
                    sent += _sent(events, step)
                    if step.delta is not None:
                        reason, stop = step.delta.finish_reason, step.delta.stop_reason
            usage = usage_of(
                turns.prompt_tokens, turns.cached_tokens, created, turns.generated,
                turns.thinking_tokens,
            )  # fmt: skip
        else:
            output, messages = await started.messages()
            message = messages[0]
            sent = events.convert(message.parsed.deltas)
            reason, stop = message.finish_reason, message.stop_reason
            usage = _usage(output, message.generated, await started.reasoning_tokens())
            there = transferred(output)
        return {
            **_opening(job),
            "content": blocks_of([*sent, *events.close()]),
            **stop_of(reason, stop, events.called),
            "usage": usage,
            **there,
        }

    async def _frames(
        self, request: Request, job: _Job, started: RunningTurn
    ) -> AsyncGenerator[bytes, None]:
        events = Events(job.single, job.omitted)
        turns = self._hosted_turns(request, job, started) if job.hosted.by_name else None
        opened = False
        steps = _steps(started) if turns is None else turns.steps()
        async with aclosing(started.running), aclosing(steps):
            async for step in steps:
                if not opened:
                    opened = True
                    message: Message = {
                        **_opening(job),
                        "content": [],
                        **stop_of(None, None, False),
                        "usage": _usage(step.output, 0),
                    }
                    yield _frame({"type": "message_start", "message": message})
                    yield _frame({"type": "ping"})
                for value in _sent(events, step):
                    yield _frame(value)
                delta = step.delta
                if delta is not None and delta.finish_reason is not None:
                    for value in events.close():
                        yield _frame(value)
                    stop = stop_of(delta.finish_reason, delta.stop_reason, events.called)
                    thought = await started.reasoning_tokens()
                    if turns is not None:
                        thought = turns.thinking_tokens
                    usage_written = written(delta.generated, thought)
                    yield _frame(
                        {"type": "message_delta", "delta": stop, "usage": usage_written,
                         **transferred(step.output)}
                    )  # fmt: skip
        yield _frame({"type": "message_stop"})


async def _steps(started: RunningTurn) -> AsyncGenerator[Step, None]:
    """The steps of an answer of one turn."""
    async with aclosing(started.running) as outputs:
        async for output in outputs:
            for delta in started.deltas(output):
                yield Step(output=output, delta=delta)


def _sent(events: Events, step: Step) -> list[BlockEvent]:
    """The events of a step."""
    if step.call is not None:
        return events.add_call(step.call)
    return [] if step.delta is None else events.convert(step.delta.events)


def _usage(output: RequestOutput, generated: int, thought: int | None = None) -> Usage:
    """The usage of an answer of one turn."""
    cached = output.num_cached_tokens or 0
    prompt = len(output.prompt_token_ids)
    return usage_of(prompt, cached, creation_tokens(output), generated, thought)


def _opening(job: _Job) -> Opening:
    return {"id": job.id, "type": "message", "role": "assistant", "model": job.model}


def _frame(value: StreamEvent) -> bytes:
    return event(value["type"], value)


def _error(error: ApiError) -> Failure:
    """Anthropic's error, with OpenAI's `param` and `code` in addition."""
    return {"type": "error", **error_body(error)}


def _failed(error: ApiError) -> bytes:
    return _frame(_error(error))
