"""`/v1/chat/completions`: chat with tools, reasoning and response formats."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from modulm_parsing import thinking_variables
from modulm_route_openai.answers import (
    StreamUsage,
    add_engine_fields,
    answer_id,
    cached_tokens,
    chat_logprobs,
    draft_metrics,
    fingerprint,
    paced,
    prompt_logprobs,
    split_in_order,
    usage,
    version_ranges,
)
from modulm_route_openai.chat_deltas import (
    ChatDeltas,
    approval_labels,
    call_chunk,
    opening_of,
    reason_of,
)
from modulm_route_openai.chat_job import ChatJob
from modulm_route_openai.messages import check_messages, last_text
from modulm_route_openai.schema import ChatRequest
from modulm_route_openai.spoken import SpokenAnswers
from modulm_server.chat_turn import ChatTurn, Delta, Message, Parsers, RunningTurn
from modulm_server.constraints import (
    allowed_tools,
    check_tools,
    requested_constraints,
    tool_names,
)
from modulm_server.flags import ServerConfig
from modulm_server.forced_calls import ForcedCalls, force_calls
from modulm_server.hosted_tools import HostedTools, hosted_tools
from modulm_server.hosted_turns import HostedTurns, with_hosted_calls
from modulm_server.json_body import bad_field, convert, json_response
from modulm_server.key_limits import current_key
from modulm_server.prompts import ChatOptions
from modulm_server.sampling import check_priority, reject_unsupported, sampling_params, shortened
from modulm_server.sse import DONE, EventStream, frame
from modulm_server.tool_servers import ToolServers
from modulm_server.transfer import transferred

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from modulm.contracts.outputs import RequestOutput
    from modulm.contracts.sampling import SamplingParams
    from modulm_frontend.beam_search import BeamSearchParams
    from modulm_route_openai.objects import (
        ChatChoice,
        ChatChunk,
        ChatChunkChoice,
        ChatCompletion,
        ChatLogprobs,
        ChatMessage,
    )
    from modulm_route_openai.schema import ChatBatchRequest
    from modulm_server.route import RouteContext
    from modulm_server.transfer import Transferred

__all__ = ["Chat"]


class Chat:
    """Answers chat requests."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._generation = context.generation
        self._parsers = Parsers.of(context.config)
        self._spoken = SpokenAnswers(context.generation, self._parsers)
        flags = context.config.group(ServerConfig)
        self._tool_servers = ToolServers.shared(context.stores, flags)

    async def stop(self) -> None:
        """End the sessions with tool servers."""
        if self._context.front:
            await self._tool_servers.close()

    async def answer(self, request: Request, body: ChatRequest) -> Response:
        """Answer a request, streamed or whole."""
        self._context.generation.check_stream(body.stream)
        job = await self._job(request, body)
        started = await job.turn.start()
        if body.stream:
            quiet = self._context.config.group(ServerConfig).sse_keep_alive_interval
            return EventStream(self._frames(request, job, started), quiet=quiet)
        return json_response(await self._whole(request, job, started))

    async def batch(self, request: Request, body: ChatBatchRequest) -> Response:
        """Answer several conversations in one response, each with one choice."""
        conversations: Sequence[Any] = body.messages
        for name, others in (("stream", (None, False)), ("n", (None, 1)), ("best_of", (None, 1))):
            if getattr(body, name) not in others:
                raise bad_field(name, f"{name} is not supported for several conversations")
        most = self._context.config.group(ServerConfig).max_request_sequences
        if len(conversations) > most:
            raise bad_field("messages", f"messages: at most {most} (--max-request-sequences)")
        table = {name: getattr(body, name) for name in ChatRequest.__struct_fields__}

        async def one(index: int) -> ChatCompletion:
            if not conversations[index]:
                raise bad_field("messages", f"messages: conversation {index} is empty")
            one_body = ChatRequest(**{**table, "messages": conversations[index]})
            job = await self._job(request, one_body)
            answer = await self._whole(request, job, await job.turn.start())
            answer["choices"][0]["index"] = index
            return answer

        tasks = [asyncio.ensure_future(one(index)) for index in range(len(conversations))]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        usages = [answer["usage"] for answer in answers]
        cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usages
                  if "prompt_tokens_details" in u]  # fmt: skip
        whole: ChatCompletion = {
            **answers[0],
            "choices": [choice for answer in answers for choice in answer["choices"]],
            "usage": usage(
                sum(each["prompt_tokens"] for each in usages),
                sum(each["completion_tokens"] for each in usages),
                sum(cached) if cached else None,
            ),
        }
        return json_response(whole)

    # Reading the request.

    async def _job(self, request: Request, body: ChatRequest, runs: bool = True) -> ChatJob:
        """Validate and render a request. Calls that it approves are made first, if it `runs`."""
        model = await self._generation.find_model(body.model)
        self._generation.check_open()
        self._check_supported(body)
        voiced = self._spoken.read(body)
        hosted = await self._hosted_tools(body)
        messages, approved = await with_hosted_calls(body.messages, hosted, runs=runs)
        check_messages(messages)
        turn = await self._turn(request, body, messages, hosted, model.adapter)
        turn = turn if voiced is None else self._spoken.prepared(turn)
        continued = bool(body.continue_final_message)
        server = self._context.config.group(ServerConfig)
        return ChatJob(
            id=answer_id("chatcmpl", request, body.request_id),
            created=int(time.time()),
            model=model.name,
            body=body,
            turn=turn,
            role=messages[-1]["role"] if continued else server.response_role,
            echo=last_text(messages) if body.echo else "",
            hosted=hosted,
            messages=messages,
            approved=approved,
            voiced=voiced,
        )

    async def _hosted_tools(self, body: ChatRequest) -> HostedTools:
        """The tools of type mcp. Raises ApiError."""
        declared = [tool for tool in body.tools or () if isinstance(tool, dict)]
        functions = [tool.get("function") for tool in declared]
        tools = [
            {"type": "function", "name": function.get("name")}
            if isinstance(function, dict)
            else tool
            for tool, function in zip(declared, functions, strict=True)
        ]
        hosted = await hosted_tools(tools, self._tool_servers, current_key())
        several = (body.n or 1) * (body.best_of or 1) > 1 or body.use_beam_search
        if hosted.by_name and several:
            raise bad_field("n", "n: tools of type mcp need one choice, without beam search")
        return hosted

    async def _turn(
        self,
        request: Request,
        body: ChatRequest,
        messages: Sequence[dict[str, Any]],
        hosted: HostedTools,
        adapter: str | None,
    ) -> ChatTurn:
        own = [t for t in body.tools or () if not isinstance(t, dict) or t.get("type") != "mcp"]
        tools = check_tools([*own, *hosted.functions])
        choice, allowed = allowed_tools(body.tool_choice or ("auto" if tools else "none"), tools)
        fewer = len(allowed) < len(tools)
        forced = partial(
            force_calls,
            choice,
            allowed,
            self._parsers,
            self._generation.tokenizer,
            parallel=body.parallel_tool_calls is not False,
            restricted=fewer,
        )
        forced_calls = await convert(request, forced)
        origin, params = self._params(body, forced_calls)
        variables = self._variables(body)
        options = self._options(body, tools, choice, variables)
        turn = ChatTurn(
            generation=self._generation,
            prompt=shortened(await self._generation.from_messages(messages, options), body),
            params=params,
            parsers=self._parsers,
            tools=tools,
            tool_choice=choice,
            allowed=tool_names(allowed) if fewer else None,
            calls_by_grammar=forced_calls.in_model_format,
            reasoning=body.include_reasoning is not False,
            tokens=bool(body.logprobs or body.return_token_ids or body.logprob_token_ids),
            template_kwargs=variables,
            fields={"structured_outputs": origin or "", "prompt": "messages"},
            priority=check_priority(self._context.config, body.priority),
            cache_salt=body.cache_salt,
            adapter=adapter,
        )
        turn.check()
        return turn

    def _hosted_turns(self, request: Request, job: ChatJob, started: RunningTurn) -> HostedTurns:
        """The answer to a request with tools that the server runs."""
        body = structs.replace(job.body, tool_choice=None)

        def next_turn(more: list[dict[str, Any]]) -> Awaitable[ChatTurn]:
            messages = [*job.messages, *more]
            return self._turn(request, body, messages, job.hosted, job.turn.adapter)

        limit = self._context.config.group(ServerConfig).tool_calls
        return HostedTurns(started, job.hosted, limit, next_turn, single=job.single_call)

    def _check_supported(self, body: ChatRequest) -> None:
        """Raise ApiError(400) for unsupported fields and values."""
        reject_unsupported(body, "prediction", "web_search_options")
        reject_unsupported(body, "functions", instead="tools")
        reject_unsupported(body, "function_call", instead="tool_choice")
        if body.service_tier not in (None, "auto", "default"):
            raise bad_field("service_tier", "service_tier must be auto or default")
        if body.top_logprobs and not body.logprobs:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
        trusted = self._context.config.group(ServerConfig).trust_request_chat_template
        if body.chat_template is not None and not trusted:
            raise bad_field(
                "chat_template",
                "chat_template is not allowed in requests: start the server with "
                "--trust-request-chat-template",
            )

    def _params(
        self, body: ChatRequest, forced_calls: ForcedCalls
    ) -> tuple[str | None, SamplingParams | BeamSearchParams]:
        constraint = forced_calls.combine(**requested_constraints(body))
        both = (body.max_tokens, body.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise bad_field("max_tokens", "max_tokens and max_completion_tokens differ: send one")
        limit = body.max_completion_tokens or body.max_tokens
        defaults = self._context.engine.info.defaults
        params = sampling_params(
            body,
            defaults=defaults,
            max_tokens=defaults.get("max_tokens") if limit is None else limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            constraint=None if constraint is None else constraint[1],
        )
        return (None if constraint is None else constraint[0]), params

    def _variables(self, body: ChatRequest) -> dict[str, Any]:
        effort = self._context.config.group(ServerConfig).effort(body.reasoning_effort)
        variables = thinking_variables(self._parsers.reasoning, effort)
        return {**variables, **(body.chat_template_kwargs or {})}

    def _options(
        self, body: ChatRequest, tools: Any, choice: Any, variables: Mapping[str, Any]
    ) -> ChatOptions:
        server = self._context.config.group(ServerConfig)
        hidden = choice == "none" and server.exclude_tools_when_tool_choice_none
        continued = bool(body.continue_final_message)
        return ChatOptions(
            tools=() if hidden else tools,
            documents=body.documents,
            template=body.chat_template,
            variables=variables,
            add_generation_prompt=not continued
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continue_final_message=continued,
            add_special_tokens=bool(body.add_special_tokens),
            media_io_kwargs=body.media_io_kwargs,
            mm_processor_kwargs=body.mm_processor_kwargs,
        )

    # A whole answer.

    async def _whole(self, request: Request, job: ChatJob, started: RunningTurn) -> ChatCompletion:
        if job.hosted.by_name:
            turns = self._hosted_turns(request, job, started)
            output, message, calls = await turns.message()
            messages = [message]
            prompt, thought = turns.prompt_tokens, turns.thinking_tokens
            cached = cached_tokens(job.body, self._context.config, output)
            cached = None if cached is None else turns.cached_tokens
            timed = turns.turn_generated
        else:
            output, messages = await started.messages()
            prompt, thought = len(output.prompt_token_ids), await started.reasoning_tokens()
            cached, calls = cached_tokens(job.body, self._context.config, output), []
            timed = sum(message.generated for message in messages)
        audio, frames = None, 0
        if job.voiced is not None and not messages[0].parsed.tool_calls:
            audio, frames = await self._spoken.whole(job.turn, job.voiced, messages[0], output)
        body: ChatCompletion = {
            "id": job.id,
            "object": "chat.completion",
            "created": job.created,
            "model": job.model,
            "system_fingerprint": fingerprint(self._context.config, self._context.engine),
            "choices": [choice async for choice in paced(messages, partial(self._choice, job))],
            "usage": usage(
                prompt, sum(message.generated for message in messages), cached, thought, frames
            ),
        }
        if audio is not None:
            body["choices"][0]["message"] |= {"content": None, "audio": audio}
        if made_calls := [*job.approved, *calls]:
            body["choices"][0]["message"]["mcp_calls"] = made_calls
        single = output if job.turn.params.n == 1 else None
        if measured := draft_metrics(job.body, self._context.config, single, timed):
            body["metrics"] = measured["metrics"]
        if job.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if job.body.return_token_ids:
            body["prompt_token_ids"] = list(output.prompt_token_ids)
        if job.body.return_prompt_text:
            body["prompt_text"] = job.turn.prompt.text
        return {**body, **transferred(output)}

    def _head(self, job: ChatJob) -> ChatChunk:
        return {
            "id": job.id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": job.model,
            "system_fingerprint": fingerprint(self._context.config, self._context.engine),
            "choices": [],
        }

    def _choice(self, job: ChatJob, message: Message) -> ChatChoice:
        parsed = message.parsed
        calls = parsed.tool_calls[:1] if job.single_call else parsed.tool_calls
        content = job.echo + parsed.content if parsed.content else job.echo or None
        message_object: ChatMessage = {
            "role": job.role,
            "content": content if content or calls else content or "",
            "refusal": None,
            "reasoning": parsed.reasoning,
            "reasoning_content": parsed.reasoning,
        }
        if calls:
            message_object["tool_calls"] = openai_calls = [call.as_openai() for call in calls]
            if labels := approval_labels(job, openai_calls):
                message_object["mcp_approval_requests"] = labels
        choice: ChatChoice = {
            "index": message.index,
            "message": message_object,
            "logprobs": self._logprobs(job, message.logprobs, message.token_ids),
            "finish_reason": reason_of(job, message.finish_reason, bool(calls)),
            "stop_reason": message.stop_reason,
        }
        add_engine_fields(choice, job.body, message)
        return choice

    def _logprobs(self, job: ChatJob, positions: Any, ids: Sequence[int]) -> ChatLogprobs | None:
        if positions is None:
            return None
        as_ids = job.body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self._context.config.group(ServerConfig).return_tokens_as_token_ids
        return chat_logprobs(positions, ids, job.body.top_logprobs or 0, as_ids)

    # A stream.

    async def _frames(
        self, request: Request, job: ChatJob, started: RunningTurn
    ) -> AsyncGenerator[bytes, None]:
        if job.hosted.by_name:
            turns = self._hosted_turns(request, job, started)
            async for part in self._hosted_frames(job, turns):
                yield part
            return
        counted = StreamUsage(job.body, self._context.config)
        head = self._head(job)
        deltas = [ChatDeltas(job) for _ in range(job.turn.params.n)]
        spoken = None if job.voiced is None else self._spoken.stream(job.turn, job.voiced)
        last: RequestOutput | None = None
        first = True
        async with aclosing(started.running) as outputs:
            async for output in outputs:
                counted.prompt(0, len(output.prompt_token_ids), output.num_cached_tokens)
                last = output if len(deltas) == 1 else None
                if first:
                    first = False
                    for index in range(len(deltas)):
                        choices = [opening_of(job, index)]
                        if spoken is not None:
                            spoken.convert(choices[0])
                        opening: ChatChunk = {**head, "choices": choices, **transferred(output)}
                        if job.body.return_prompt_text and index == 0:
                            opening["prompt_text"] = job.turn.prompt.text
                        if counted.each:
                            opening["usage"] = counted.now(index)
                        yield frame(opening)
                if spoken is not None:
                    spoken.note(output)
                for new in started.deltas(output):
                    counted.generated(new.index, new.generated)
                    pieces = self._pieces(job, new, deltas[new.index])
                    for choice in pieces if spoken is None else map(spoken.convert, pieces):
                        body: ChatChunk = {**head, "choices": [choice]}
                        if counted.each:
                            body["usage"] = counted.now(new.index)
                        yield frame(body)
        if spoken is not None:
            async with aclosing(spoken.sounds()) as sounds:
                async for choice in sounds:
                    yield frame({**head, "choices": [choice]})
        if counted.last:
            audio = 0 if spoken is None else spoken.frames
            total = counted.total(await started.reasoning_tokens(), audio)
            made = total["completion_tokens"]
            metrics = draft_metrics(job.body, self._context.config, last, made)
            yield frame({**head, "usage": total, **metrics})
        yield DONE

    async def _hosted_frames(self, job: ChatJob, turns: HostedTurns) -> AsyncGenerator[bytes, None]:
        """The frames of an answer in which the server calls tools."""
        counted, head = StreamUsage(job.body, self._context.config), self._head(job)
        deltas, last, is_first = ChatDeltas(job), None, True
        async with aclosing(turns.steps()) as steps:
            async for step in steps:
                choices: list[ChatChunkChoice] = []
                params: Transferred = {}
                if last is None:
                    params = transferred(step.output)
                    choices.append(opening_of(job, 0))
                    choices += [call_chunk(call) for call in job.approved]
                last = step.output
                if step.call is not None:
                    choices.append(call_chunk(step.call))
                if step.delta is not None:
                    choices += self._pieces(job, step.delta, deltas)
                counted.prompt(0, turns.prompt_tokens, turns.cached_tokens)
                counted.generated(0, turns.generated)
                for choice in choices:
                    body: ChatChunk = {**head, "choices": [choice], **params}
                    if is_first and job.body.return_prompt_text:
                        body["prompt_text"] = job.turn.prompt.text
                    params, is_first = {}, False
                    if counted.each:
                        body["usage"] = counted.now(0)
                    yield frame(body)
        if counted.last:
            total = counted.total(turns.thinking_tokens)
            made = turns.turn_generated
            metrics = draft_metrics(job.body, self._context.config, last, made)
            yield frame({**head, "usage": total, **metrics})
        yield DONE

    def _pieces(self, job: ChatJob, new: Delta, deltas: ChatDeltas) -> Iterator[ChatChunkChoice]:
        """The chunk choices of a delta, mostly one."""
        *others, last = split_in_order(new.events)
        for events in others:
            delta = deltas.convert(events)
            if delta:
                yield {"index": new.index, "delta": delta, "logprobs": None, "finish_reason": None}
        delta = deltas.convert(last)
        ids = job.body.return_token_ids and new.token_ids
        if not (delta or new.finish_reason or new.logprobs or ids):
            return
        choice: ChatChunkChoice = {
            "index": new.index,
            "delta": delta,
            "logprobs": self._logprobs(job, new.logprobs, new.token_ids),
            "finish_reason": None,
        }
        if new.finish_reason is not None:
            choice["finish_reason"] = reason_of(job, new.finish_reason, deltas.called)
            choice["stop_reason"] = new.stop_reason
            if job.body.return_weight_versions:
                choice["weight_versions"] = version_ranges(new.weight_versions)
        if job.body.return_token_ids:
            choice["token_ids"] = list(new.token_ids)
        yield choice
