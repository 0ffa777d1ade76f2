"""The route family of Cohere's chat API."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import frozen
from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm_parsing import assemble
from modulm_route_cohere.answers import (
    Events,
    finish_of,
    logprobs_of,
    message_of,
    old_calls_of,
    usage_of,
)
from modulm_route_cohere.objects import ChatAnswer, Failure, OldChatAnswer, OldLine, StreamEvent
from modulm_route_cohere.schema import (
    ChatRequest,
    OldChatRequest,
    constraint_of,
    documents_of,
    messages_of,
    params_of,
    tools_of,
    updated,
    variables_of,
)
from modulm_server.chat_turn import ChatTurn, Parsers
from modulm_server.errors import error_body, respond
from modulm_server.flags import ServerConfig
from modulm_server.forced_calls import force_calls
from modulm_server.json_body import convert, json_response, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.prompts import ChatOptions
from modulm_server.rendering import Rendered, rendered
from modulm_server.route import RouteFamily
from modulm_server.sampling import check_priority
from modulm_server.sse import DONE, EventStream, event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from modulm.contracts.parser import Event
    from modulm_parsing import ParsedMessage
    from modulm_server.chat_turn import RunningTurn
    from modulm_server.errors import ApiError

__all__ = ["Cohere"]

_LINES = "application/x-ndjson"


@frozen
class _Job:
    """A validated request. messages: of its conversation, in OpenAI's form."""

    id: str
    model: str
    body: ChatRequest
    messages: list[dict[str, Any]]
    turn: ChatTurn


class Cohere(RouteFamily):
    """`/v2/chat`, `/v1/chat`, and vLLM's `/cohere/v2/chat` and its `/render`."""

    name = "cohere"
    api = 2

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Cohere"])
        self._parsers = Parsers.of(self.context.config)
        for path in ("/v2/chat", "/cohere/v2/chat"):
            router.add_api_route(
                path,
                self.with_errors(self.create),
                methods=["POST"],
                openapi_extra=request_docs(ChatRequest),
                responses=response_docs(ChatAnswer, events=StreamEvent, failure=Failure),
            )
            router.add_api_route(
                f"{path}/render",
                self.with_errors(self.render),
                methods=["POST"],
                openapi_extra=request_docs(ChatRequest),
                responses=response_docs(Rendered, failure=Failure),
            )
        router.add_api_route(
            "/v1/chat",
            self.with_errors(self.create_old),
            methods=["POST"],
            openapi_extra=request_docs(OldChatRequest),
            responses=response_docs(OldChatAnswer, lines=OldLine, failure=Failure),
        )
        return router

    def failure(self, error: ApiError) -> Failure:
        """See `RouteFamily.failure`."""
        return _failure(error)

    def error_response(self, error: ApiError) -> Response:
        return respond(error, _failure)

    async def create(self, request: Request) -> Response:
        """Generate the next message of a conversation."""
        job = await self._job(request, await read(request, ChatRequest))
        started = await job.turn.start()
        if job.body.stream:
            quiet = self.context.config.group(ServerConfig).sse_keep_alive_interval
            return EventStream(_events(job, started), quiet=quiet, failed=_failed)
        output, (message,) = await started.messages()
        cached = output.num_cached_tokens or 0
        called = bool(message.parsed.tool_calls)
        answer: ChatAnswer = {
            "id": job.id,
            "finish_reason": finish_of(message.finish_reason, message.stop_reason, called=called),
            "message": message_of(message.parsed),
            "usage": usage_of(len(output.prompt_token_ids), cached, message.generated),
        }
        if job.body.logprobs:
            answer["logprobs"] = logprobs_of(message.logprobs, message.token_ids)
        return json_response(answer)

    async def create_old(self, request: Request) -> Response:
        """Generate the next message of a conversation, in version 1 of the API."""
        old_body = await read(request, OldChatRequest)
        job = await self._job(request, await convert(request, updated, old_body))
        started = await job.turn.start()
        if job.body.stream:
            return EventStream(_lines(job, started), media=_LINES, failed=_failed_line)
        output, (message,) = await started.messages()
        cached = output.num_cached_tokens or 0
        usage = usage_of(len(output.prompt_token_ids), cached, message.generated)
        finish = finish_of(message.finish_reason, message.stop_reason, called=False)
        return json_response(_old_answer(job, message.parsed, finish, usage))

    async def render(self, request: Request) -> Response:
        """Render a conversation into an engine request, without running it."""
        body = await read(request, ChatRequest)
        job = await self._job(request, body)
        turn, tokenizer = job.turn, self.context.generation.tokenizer
        return json_response(
            rendered(
                job.id, job.model, turn.prompt, turn.engine_params(), tokenizer,
                stream=body.stream, cache_salt=body.cache_salt, priority=turn.priority,
            )
        )  # fmt: skip

    async def _job(self, request: Request, body: ChatRequest) -> _Job:
        generation, config = self.context.generation, self.context.config
        model = await generation.find_model(body.model)
        generation.check_open()
        messages = await convert(request, messages_of, body)
        tools, choice = tools_of(body)
        forced_calls = force_calls(choice, tools, self._parsers, generation.tokenizer)
        constraint = forced_calls.combine(response_format=constraint_of(body))
        variables = variables_of(body, self._parsers.reasoning)
        params = params_of(
            body,
            self.context.engine.info.defaults,
            None if constraint is None else constraint[1],
            counts_thoughts=bool(self._parsers.reasoning),
        )
        options = ChatOptions(tools=tools, documents=documents_of(body), variables=variables)
        turn = ChatTurn(
            api="cohere",
            generation=generation,
            prompt=await generation.from_messages(messages, options),
            params=params,
            parsers=self._parsers,
            tools=tools,
            tool_choice=choice,
            calls_by_grammar=forced_calls.in_model_format,
            reasoning=(body.thinking or {}).get("type") != "disabled",
            tokens=bool(body.logprobs),
            template_kwargs=variables,
            cache_salt=body.cache_salt,
            priority=check_priority(config, body.priority),
            fields={
                "thinking_token_budget": "thinking",
                "stop": "stop_sequences",
                "top_k": "k",
                "top_p": "p",
                "prompt": "messages",
                "structured_outputs": constraint[0] if constraint else "",
            },
            adapter=model.adapter,
        )
        turn.check()
        return _Job(request.scope["modulm.id"], model.name, body, messages, turn)


async def _events(job: _Job, started: RunningTurn) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer."""
    events = Events()
    message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": []}
    yield _frame({"type": "message-start", "id": job.id, "delta": {"message": message}})
    async with aclosing(started.running) as outputs:
        async for output in outputs:
            for delta in started.deltas(output):
                logprobs = logprobs_of(delta.logprobs, delta.token_ids)
                for sent in events.convert(delta.events):
                    if logprobs and sent["type"] == "content-delta":
                        sent["logprobs"] = {
                            "text": "".join(entry["text"] for entry in logprobs),
                            "token_ids": [entry["token_ids"][0] for entry in logprobs],
                            "logprobs": [entry["logprobs"][0] for entry in logprobs],
                        }
                        logprobs = []
                    yield _frame(sent)
                if delta.finish_reason is not None:
                    for sent in events.close():
                        yield _frame(sent)
                    finish = finish_of(delta.finish_reason, delta.stop_reason, called=events.called)
                    cached = output.num_cached_tokens or 0
                    usage = usage_of(len(output.prompt_token_ids), cached, delta.generated)
                    end = {"finish_reason": finish, "usage": usage}
                    yield _frame({"type": "message-end", "id": job.id, "delta": end})
    yield DONE


async def _lines(job: _Job, started: RunningTurn) -> AsyncGenerator[bytes, None]:
    """The lines of a streamed answer of version 1."""
    events: list[Event] = []
    yield _line("stream-start", generation_id=job.id)
    async with aclosing(started.running) as outputs:
        async for output in outputs:
            for delta in started.deltas(output):
                events += delta.events
                text = assemble(delta.events).content
                if text:
                    yield _line("text-generation", text=text)
                if delta.finish_reason is None:
                    continue
                parsed = assemble(events)
                if parsed.tool_calls:
                    yield _line("tool-calls-generation", tool_calls=old_calls_of(parsed))
                finish = finish_of(delta.finish_reason, delta.stop_reason, called=False)
                cached = output.num_cached_tokens or 0
                usage = usage_of(len(output.prompt_token_ids), cached, delta.generated)
                answer = _old_answer(job, parsed, finish, usage)
                yield _line("stream-end", finish_reason=finish, response=answer)


_ROLES = {"user": "USER", "assistant": "CHATBOT", "system": "SYSTEM"}


def _old_answer(job: _Job, parsed: ParsedMessage, finish: str, usage: Any) -> OldChatAnswer:
    text = parsed.content or ""
    history = [
        {"role": _ROLES[message["role"]], "message": message.get("content", "")}
        for message in job.messages
        if message["role"] in _ROLES and not message.get("tool_calls")
    ]
    answer: OldChatAnswer = {
        "response_id": job.id,
        "generation_id": job.id,
        "text": text,
        "finish_reason": finish,
        "chat_history": [*history, {"role": "CHATBOT", "message": text}],
        "meta": {"api_version": {"version": "1"}, **usage},
    }
    if parsed.tool_calls:
        answer["tool_calls"] = old_calls_of(parsed)
    return answer


def _frame(value: StreamEvent) -> bytes:
    return event(value["type"], value)


def _line(kind: str, **fields: Any) -> bytes:
    finished = kind == "stream-end"
    return msgspec.json.encode({"event_type": kind, "is_finished": finished, **fields}) + b"\n"


def _failure(error: ApiError) -> Failure:
    body = error_body(error)
    return {"message": body["error"]["message"], "error": body["error"]}


def _failed(error: ApiError) -> bytes:
    """The end of a stream that fails, with the error in `delta` as Cohere's clients read it."""
    delta = {"finish_reason": "ERROR", "error": _failure(error)["message"]}
    return _frame({"type": "message-end", "delta": delta}) + DONE


def _failed_line(error: ApiError) -> bytes:
    answer = {"text": "", "finish_reason": "ERROR", "message": _failure(error)["message"]}
    return _line("stream-end", finish_reason="ERROR", response=answer)
