"""The route family of OpenAI's responses API."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request
from msgspec import structs
from starlette.responses import Response

from modulm_parsing import thinking_variables
from modulm_route_responses.approvals import approvals, declined
from modulm_route_responses.body import refuse, response, summed, usage
from modulm_route_responses.conversations import Conversations
from modulm_route_responses.events import Log
from modulm_route_responses.flags import ResponsesConfig
from modulm_route_responses.job import Job, RawMessages, calls_made, end_early, stays_with_server
from modulm_route_responses.objects import Deleted, Event, InputTokens, ResponseObject
from modulm_route_responses.output import LogprobsOf, Output
from modulm_route_responses.prompts import StoredPrompts
from modulm_route_responses.schema import (
    ResponsesRequest,
    choice_of,
    constraint_of,
    effort_of,
    in_pieces,
    items_of,
    messages_of,
    params_of,
    tools_of,
    wants_logprobs,
)
from modulm_route_responses.store import Store, Stored
from modulm_server.auth import owner_of
from modulm_server.chat_turn import ChatTurn, Parsers
from modulm_server.constraints import tool_names
from modulm_server.errors import ApiError, describe, escape
from modulm_server.flags import ServerConfig
from modulm_server.forced_calls import force_calls
from modulm_server.hosted_tools import HostedTools, hosted_tools
from modulm_server.json_body import bad_field, convert, json_response, read, request_docs
from modulm_server.key_limits import current_key
from modulm_server.openapi import response_docs
from modulm_server.paging import Page, page
from modulm_server.prompts import ChatOptions, Prompt
from modulm_server.rendering import Rendered, rendered
from modulm_server.route import RouteFamily
from modulm_server.sampling import check_priority
from modulm_server.sse import EventStream
from modulm_server.tool_servers import ToolServers
from modulm_server.transfer import transferred

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from modulm.contracts.sampling import SamplingParams
    from modulm_server.chat_turn import RunningTurn
    from modulm_server.generation import ServedModel

__all__ = ["Responses"]

log = logging.getLogger("modulm_server")


class Responses(RouteFamily):
    """`/v1/responses`."""

    name = "responses"
    api = 2
    shared_paths = (
        *(f"/v1/responses/{{response_id}}{end}" for end in ("", "/cancel", "/input_items")),
        "/v1/conversations",
        *(
            f"/v1/conversations/{{conversation_id}}{end}"
            for end in ("", "/items", "/items/{item_id}")
        ),
    )

    def router(self) -> APIRouter:
        self._parsers = Parsers.of(self.context.config)
        stores = self.context.stores
        self._store: Store = stores.setdefault("responses", Store())
        self._conversations: Conversations = stores.setdefault("conversations", Conversations())
        flags = self.context.config.group(ResponsesConfig)
        self._prompts = StoredPrompts.of(flags)
        server_flags = self.context.config.group(ServerConfig)
        self._tool_servers = ToolServers.shared(stores, server_flags)
        self._most_calls = server_flags.tool_calls
        router = APIRouter(prefix="/v1", tags=["Responses"])
        stream_docs = response_docs(ResponseObject, events=Event)
        for path, endpoint, answers in (
            ("/responses", self.create, stream_docs),
            ("/responses/input_tokens", self.count, response_docs(InputTokens)),
            ("/responses/render", self.render, response_docs(Rendered)),
        ):
            router.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                openapi_extra=request_docs(ResponsesRequest),
                responses=answers,
            )
        one = "/responses/{response_id}"
        for method, path, plain, answers in (
            ("GET", one, self.retrieve, stream_docs),
            ("DELETE", one, self.delete, response_docs(Deleted)),
            ("POST", f"{one}/cancel", self.cancel, response_docs(ResponseObject)),
            ("GET", f"{one}/input_items", self.input_items, response_docs(Page[dict[str, Any]])),
        ):
            router.add_api_route(path, plain, methods=[method], responses=answers)
        self._conversations.add_routes(router)
        return router

    async def stop(self) -> None:
        if self.context.front:
            await self._tool_servers.close()
            await self._store.stop()

    async def create(self, request: Request) -> Response:
        """Create a response."""
        job, body = await self._job(request, await read(request, ResponsesRequest))
        if body.background:
            return self._start_background(job, stream=bool(body.stream))
        started = await job.turn.start()
        if body.stream:
            quiet = self.context.config.group(ServerConfig).sse_keep_alive_interval
            return EventStream(self._frames(job, started), quiet=quiet, failed=job.failed)
        await self._whole(job, started)
        return json_response(job.body)

    async def count(self, request: Request) -> Response:
        """Count the tokens of a request's input. Generates and stores nothing."""
        job, _ = await self._job(request, await read(request, ResponsesRequest), runs=False)
        tokens = len(job.turn.prompt.ids)
        counted: InputTokens = {"object": "response.input_tokens", "input_tokens": tokens}
        return json_response(counted)

    async def render(self, request: Request) -> Response:
        """Render a request into an engine request. Generates and stores nothing."""
        job, body = await self._job(request, await read(request, ResponsesRequest), runs=False)
        turn, tokenizer = job.turn, self.context.generation.tokenizer
        return json_response(
            rendered(
                job.body["id"], job.body["model"], turn.prompt, turn.engine_params(), tokenizer,
                stream=body.stream, cache_salt=body.cache_salt, priority=body.priority,
            )
        )  # fmt: skip

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """Retrieve a stored response, or stream its events after `starting_after`."""
        stored = self._store.get(response_id, owner_of(request))
        start = _start_index(request.query_params.get("starting_after"))
        if request.query_params.get("stream") != "true":
            if start:
                raise bad_field("starting_after", "starting_after needs stream=true")
            return json_response(stored.body)
        if stored.log is None:
            raise bad_field(
                "stream",
                "stream: the events of this response are not stored; create it with "
                "background: true and stream: true",
            )
        return self._stream(stored.log, start)

    async def input_items(self, request: Request, response_id: str) -> Response:
        """List the input items of a response, including the conversation before it."""
        stored = self._store.get(response_id, owner_of(request))
        return json_response(page(stored.items, request.query_params))

    async def delete(self, request: Request, response_id: str) -> Response:
        """Delete a stored response."""
        stored = self._store.get(response_id, owner_of(request))
        await _end(stored)
        self._store.remove(response_id)
        deleted: Deleted = {"id": response_id, "object": "response", "deleted": True}
        return json_response(deleted)

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Cancel a background response."""
        stored = self._store.get(response_id, owner_of(request))
        if not stored.body["background"]:
            raise ApiError(400, "only background responses can be cancelled")
        await _end(stored)
        return json_response(stored.body)

    # Reading the request.

    async def _job(
        self, request: Request, body: ResponsesRequest, runs: bool = True
    ) -> tuple[Job, ResponsesRequest]:
        """Validate and render a request; returns it with its stored prompt applied.

        Calls that the client has approved are made first, if it `runs`.
        """
        generation = self.context.generation
        model = await generation.find_model(body.model)
        generation.check_open()
        refuse(body)
        self._store.check_new(body.request_id)
        body, prompt_messages = self._prompts.apply(body)
        owner = owner_of(request)
        conversation = self._conversations.find(body.conversation, owner)
        before: Stored | None = None
        if body.previous_response_id is not None:
            before = self._store.get(body.previous_response_id, owner, "previous_response_id")
            if before.body["status"] in ("queued", "in_progress"):
                raise bad_field(
                    "previous_response_id",
                    "previous_response_id: this response is not complete yet",
                )
        earlier = conversation.items if conversation is not None else []
        new_messages = messages_of([*earlier, *prompt_messages], needed=False)
        read_messages = partial(messages_of, body.input, needed=not new_messages)
        earlier_messages = before.messages if before else []
        messages = [
            *earlier_messages,
            *new_messages,
            *await convert(request, read_messages),
        ]
        input_items = [*items_of(prompt_messages), *await convert(request, items_of, body.input)]
        earlier_items: list[Any] = [*before.items, *before.body["output"]] if before else []
        items = [*earlier_items, *earlier, *input_items]
        hosted = await hosted_tools(body.tools or (), self._tool_servers, current_key())
        calls = []
        responses = [item for item in input_items if item["type"] == "mcp_approval_response"]
        for call, approved in approvals(responses, items):
            if not approved:
                declined(call)
            elif runs:
                await hosted.run(call)
            calls.append(call)
        messages += messages_of(calls, needed=False)
        turn, params = await self._turn(body, messages, model, hosted)
        stored = Stored(owner, response(body, model.name, params), messages, items)
        if conversation is not None:
            stored.body["conversation"] = {"id": conversation.id}
        output = Output(
            single=body.parallel_tool_calls is False,
            logprobs=LogprobsOf(self._generation_tokens, body.top_logprobs or 0)
            if wants_logprobs(body)
            else None,
            hosted=hosted.by_name,
        )
        seen = {i["server_label"] for i in earlier_items if i["type"] == "mcp_list_tools"}
        output.items += [item for item in hosted.listed if item["server_label"] not in seen]
        output.items += calls
        job = Job(
            turn,
            stored,
            output,
            keep=body.store is not False,
            pieces=in_pieces(body),
            conversation=conversation,
            request_items=input_items,
            hosted=hosted,
            request=body,
            model=model,
            raw=RawMessages.of(turn.prompt) if body.enable_response_messages else None,
        )
        return job, body

    @property
    def _generation_tokens(self) -> frozenset[int]:
        """The ids of special tokens."""
        return frozenset(self.context.generation.tokenizer.special_ids)

    async def _turn(
        self,
        body: ResponsesRequest,
        messages: list[dict[str, Any]],
        model: ServedModel,
        hosted: HostedTools,
    ) -> tuple[ChatTurn, SamplingParams]:
        tools = tools_of(body, hosted.functions)
        choice, allowed = choice_of(body, tools)
        fewer = len(allowed) < len(tools)
        forced_calls = force_calls(
            choice,
            allowed,
            self._parsers,
            self.context.generation.tokenizer,
            parallel=body.parallel_tool_calls is not False,
            restricted=fewer,
        )
        constraint = constraint_of(body, forced_calls)
        variables = {
            **thinking_variables(
                self._parsers.reasoning,
                self.context.config.group(ServerConfig).effort(effort_of(body)),
                field="reasoning",
            ),
            **(body.chat_template_kwargs or {}),
        }
        grammar = None if constraint is None else constraint[1]
        params = params_of(body, self.context.engine.info.defaults, grammar)
        turn = ChatTurn(
            api="responses",
            generation=self.context.generation,
            prompt=await self._prompt(
                body,
                messages,
                ChatOptions(
                    tools=tools,
                    variables=variables,
                    media_io_kwargs=body.media_io_kwargs,
                    mm_processor_kwargs=body.mm_processor_kwargs,
                ),
            ),
            params=params,
            parsers=self._parsers,
            tools=tools,
            tool_choice=choice,
            allowed=tool_names(allowed) if fewer else None,
            calls_by_grammar=forced_calls.in_model_format,
            reasoning=body.include_reasoning is not False,
            tokens=wants_logprobs(body),
            template_kwargs=variables,
            priority=check_priority(self.context.config, body.priority),
            cache_salt=body.cache_salt,
            fields={
                "prompt": "input",
                "messages": "input",
                "max_tokens": "max_output_tokens",
                "structured_outputs": constraint[0] if constraint else "",
            },
            adapter=model.adapter,
        )
        turn.check()
        return turn, params

    async def _prompt(
        self, body: ResponsesRequest, messages: list[dict[str, Any]], options: ChatOptions
    ) -> Prompt:
        """Render the prompt. With `truncation: auto`, drop the oldest messages until it fits."""
        generation = self.context.generation
        system = [] if body.instructions is None else [_system(body.instructions)]
        prompt: Prompt = await generation.from_messages([*system, *messages], options)
        room = self.context.engine.info.max_model_len - (body.max_output_tokens or 1)
        if body.truncation != "auto" or len(prompt.ids) <= room:
            return prompt
        starts = _starts(messages)
        few, most = 0, len(starts)
        while few < most:
            middle = (few + most) // 2
            shortened = [*system, *messages[starts[middle] :]]
            shorter = await generation.from_messages(shortened, options)
            if len(shorter.ids) <= room:
                prompt, most = shorter, middle
            else:
                few = middle + 1
        return prompt

    # Running it.

    def _start_background(self, job: Job, *, stream: bool) -> Response:
        """Start a background response. Its events are stored if it is streamed."""
        stored = job.stored
        self._store.put(stored)
        stored.log = Log() if stream else None
        stored.task = asyncio.get_running_loop().create_task(self._run_in_background(job))
        return self._stream(stored.log) if stored.log else json_response(stored.body)

    def _stream(self, events: Log, start: int = 0) -> Response:
        quiet = self.context.config.group(ServerConfig).sse_keep_alive_interval
        return EventStream(events.read(start), quiet=quiet)

    async def _run_in_background(self, job: Job) -> None:
        """Run a background response and store its result or error."""
        stored, body = job.stored, job.body
        events = stored.log
        try:
            if events is None:
                body["status"] = "in_progress"
                await self._whole(job, await job.turn.start())
            else:
                events.add(job.state("created"))
                events.add(job.state("queued"))
                started = await job.turn.start()
                async for frame in self._frames(job, started):
                    events.add(frame)
        except asyncio.CancelledError:
            end_early(job, "cancelled")
            raise
        except Exception as error:
            api_error = describe(error, body["id"])
            log.error("Response %s failed: %s", body["id"], escape(str(error)))
            body["error"] = {"code": api_error.code or "server_error", "message": api_error.message}
            end_early(job, "failed")
        finally:
            stored.task = None
            if events is not None:
                events.close()
                self._store.trim()

    async def _whole(self, job: Job, started: RunningTurn) -> None:
        if job.pieces or job.output.items or job.hosted.by_name:
            async for _ in self._frames(job, started):
                pass
            return
        output, messages = await started.messages()
        if job.raw is not None:
            job.raw.add_output(output.outputs[0])
            job.raw.end_turn()
        for _ in job.output.feed(messages[0].parsed.deltas):
            pass
        thought = await started.reasoning_tokens() or 0
        self._finish(job, output, messages[0].finish_reason, (messages[0].generated, thought))

    def _finish(
        self, job: Job, output: Any, reason: str, counts: tuple[int, int]
    ) -> list[dict[str, Any]]:
        """Complete and store the response; returns the events that close its last item.

        counts: generated tokens, and thinking tokens among them.
        """
        cut = reason in ("length", "repetition", _TOO_MANY)
        status: Literal["incomplete", "completed"] = "incomplete" if cut else "completed"
        last = list(job.output.close(status))
        body = job.body
        body["status"] = status
        body["completed_at"] = int(time.time())
        body["incomplete_details"] = {"reason": _REASONS.get(reason, reason)} if cut else None
        body["output"] = job.output.items
        body["usage"] = summed([*job.usages, usage(output, *counts)])
        if job.raw is not None:
            body["input_messages"], body["output_messages"] = job.raw.input, job.raw.output
        if (there := transferred(output).get("kv_transfer_params")) is not None:
            body["kv_transfer_params"] = there
        job.stored.messages += messages_of(job.output.items, needed=False)
        if job.keep:
            self._store.put(job.stored)
        if job.conversation is not None:
            job.conversation.add([*job.request_items, *job.output.items])
        return last

    async def _frames(self, job: Job, started: RunningTurn) -> AsyncGenerator[bytes, None]:
        if not job.body["background"]:
            yield job.state("created")
        job.body["status"] = "in_progress"
        yield job.state("in_progress")
        for index in range(len(job.output.items)):
            for value in job.output.shown(index):
                yield job.frame(value)
        while True:
            first = len(job.output.items)
            async with aclosing(started.running) as outputs:
                async for output in outputs:
                    if job.raw is not None:
                        job.raw.add_output(output.outputs[0])
                    for delta in started.deltas(output):
                        for value in job.output.feed(delta.events, delta):
                            yield job.frame(value)
                        if delta.finish_reason is None:
                            continue
                        reason = delta.finish_reason
                        counts = delta.generated, await started.reasoning_tokens() or 0
            if job.raw is not None:
                job.raw.end_turn()
            if reason != "length" and job.hosted.by_name:
                for value in job.output.close():
                    yield job.frame(value)
                async for value in self._run_calls(job):
                    yield job.frame(value)
                if not stays_with_server(job.output.items[first:]):
                    pass
                elif calls_made(job) < self._limit(job):
                    job.usages.append(usage(output, *counts))
                    started = await self._go_on(job)
                    continue
                else:
                    reason = _TOO_MANY
            for value in self._finish(job, output, reason, counts):
                yield job.frame(value)
            yield job.state(job.body["status"])
            return

    def _limit(self, job: Job) -> int:
        """The number of calls of tool servers after which the response ends."""
        requested = None if job.request is None else job.request.max_tool_calls
        return min(self._most_calls, requested or self._most_calls)

    async def _run_calls(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        """Make the calls that wait, and yield their events; none beyond the limit."""
        for index in job.output.waiting():
            item = job.output.items[index]
            place = {"output_index": index, "item_id": item["id"]}
            yield {"type": "response.mcp_call.in_progress", **place}
            if calls_made(job) < self._limit(job):
                await job.hosted.run(item)
            else:
                item |= {"status": "failed", "error": "too many tool calls"}
            yield {"type": f"response.mcp_call.{item['status']}", **place}
            yield {"type": "response.output_item.done", "output_index": index, "item": dict(item)}

    async def _go_on(self, job: Job) -> RunningTurn:
        """Start the turn after the server's calls."""
        if job.request is None or job.model is None:
            raise ApiError(500, "this response cannot go on")
        body = structs.replace(job.request, tool_choice=None)
        messages = [*job.stored.messages, *messages_of(job.output.items, needed=False)]
        turn, _ = await self._turn(body, messages, job.model, job.hosted)
        if job.raw is not None:
            job.raw.add_prompt(turn.prompt)
        return await turn.start()


#: The end of a response whose model called too many tools.
_TOO_MANY = "max_tool_calls"
_REASONS = {"length": "max_output_tokens"}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _starts(messages: list[dict[str, Any]]) -> list[int]:
    """Indices where a truncated conversation may start: not at a tool result."""
    return [index for index, message in enumerate(messages) if message["role"] != "tool"][1:]


def _start_index(after: str | None) -> int:
    """The index of the first event to send. Raises ApiError(400)."""
    if after is None:
        return 0
    if not after.isascii() or not after.isdigit() or len(after) > 9:
        raise bad_field("starting_after", "starting_after must be the sequence number of an event")
    return int(after) + 1


async def _end(stored: Stored) -> None:
    """Cancel a response's task. Sets the status here, as the task may not have started."""
    task = stored.task
    if task is None:
        return
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not stored.over:
        stored.body["status"] = "cancelled"
        stored.task = None
        if stored.log is not None:
            stored.log.close()
