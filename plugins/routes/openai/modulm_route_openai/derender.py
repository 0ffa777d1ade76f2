"""`.../derender`: answers in token ids as responses of OpenAI's API, with vLLM's fields.

The text of a stream is decoded from all of its tokens, which `stream_state` carries: the server
stores nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from msgspec import Meta, Struct

from modulm_parsing import assemble
from modulm_route_openai.answers import answer_id, fingerprint, usage
from modulm_route_openai.chat import Chat
from modulm_route_openai.chat_deltas import ChatDeltas, opening_of, reason_of
from modulm_route_openai.objects import ChatChunk, Completion, CompletionChunk, Usage
from modulm_route_openai.schema import ChatRequest, CompletionRequest
from modulm_server.chat_turn import Message
from modulm_server.json_body import bad_field, json_response
from modulm_server.rendering import rendered, token_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from modulm_route_openai.chat_job import ChatJob
    from modulm_route_openai.objects import ChatChunkChoice, ChatCompletion, CompletionChoice

__all__ = [
    "ChatDerenderRequest",
    "CompletionDerenderRequest",
    "Derender",
    "DerenderedChat",
    "DerenderedCompletion",
    "TokenChoice",
]

Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TokenChoice(Struct, kw_only=True):
    """A choice of `/inference/v1/generate`, or a chunk of one."""

    index: Annotated[int, Meta(ge=0)] = 0
    token_ids: list[Id] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Any = None


class TokenAnswer(Struct, kw_only=True):
    """A response of `/inference/v1/generate`, or a chunk of one."""

    request_id: str | None = None
    output_mode: Literal["tokens"] = "tokens"
    choices: list[TokenChoice]


class StreamState(Struct, kw_only=True):
    """What the next chunk of a choice needs: its tokens so far."""

    token_ids: list[Id]


class _Request(Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    generate_chunk: TokenAnswer | None = None
    stream_state: StreamState | None = None


class ChatDerenderRequest(_Request, kw_only=True):
    """`POST /v1/chat/completions/derender`. chat_request: the request that was rendered."""

    chat_request: ChatRequest
    generate_response: TokenAnswer | None = None
    prompt_tokens: Tokens | None = None
    prompt_token_ids: list[Id] | None = None


class CompletionDerenderRequest(_Request, kw_only=True):
    """`POST /v1/completions/derender`. completion_request: the request that was rendered."""

    completion_request: CompletionRequest | None = None
    generate_responses: list[TokenAnswer] | None = None
    prompt_tokens: list[Tokens] | Tokens | None = None
    prompt_token_ids: Any = None


class DerenderedChat(TypedDict):
    """A chunk of a chat, and what to send with the next one."""

    chunk: ChatChunk
    stream_state: dict[str, Any]


class DerenderedCompletion(TypedDict):
    """A chunk of a completion, and what to send with the next one."""

    chunk: CompletionChunk
    stream_state: dict[str, Any]


class Derender(Chat):
    """Converts requests to token ids, and token ids to responses."""

    async def rendered(self, request: Request, body: ChatRequest) -> Response:
        """Render the request as an engine request."""
        job = await self._job(request, body, runs=False)
        turn, tokenizer = job.turn, self._generation.tokenizer
        answer = rendered(
            job.id,
            job.model,
            turn.prompt,
            turn.engine_params(),
            tokenizer,
            stream=body.stream,
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        if body.return_token_offsets:
            prompt, run = turn.prompt, self._generation.work.run
            size = len(prompt.text or "")
            answer["token_offsets"] = await run(size, token_offsets, prompt, tokenizer)
        return json_response(answer)

    async def chat(self, request: Request, body: ChatDerenderRequest) -> Response:
        """Convert an answer to a chat, or a chunk of one."""
        if body.stream:
            choice, before = _one(body)
            chunk = await self._chat_chunk(request, body.chat_request, before, choice)
            derendered: DerenderedChat = {
                "chunk": chunk,
                "stream_state": {"token_ids": [*before, *(choice.token_ids or ())]},
            }
            return json_response(derendered)
        if body.generate_response is None:
            raise bad_field("generate_response", "generate_response is missing")
        answer = await self._whole_chat(
            request, body.chat_request, body.generate_response.choices, _count(body.prompt_tokens)
        )
        return json_response(answer)

    async def completion(self, request: Request, body: CompletionDerenderRequest) -> Response:
        """Convert answers to completions, or a chunk of one."""
        asked = body.completion_request or CompletionRequest()
        model = await self._context.generation.find_model(body.model or asked.model)
        head: CompletionChunk = {
            "id": answer_id("cmpl", request, asked.request_id),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": fingerprint(self._context.config, self._context.engine),
            "choices": [],
        }
        if body.stream:
            choice, before = _one(body)
            ids = [*before, *(choice.token_ids or ())]
            earlier = await self._text(asked, TokenChoice(token_ids=before))
            text = await self._text(asked, choice, ids)
            derendered: DerenderedCompletion = {
                "chunk": {**head, "choices": [_completion(choice, text[len(earlier) :])]},
                "stream_state": {"token_ids": ids},
            }
            return json_response(derendered)
        answers = body.generate_responses
        if not answers:
            raise bad_field("generate_responses", "generate_responses is missing")
        counts = body.prompt_tokens
        counts = counts if isinstance(counts, list) else [_count(counts)] * len(answers)
        if len(counts) != len(answers):
            raise bad_field("prompt_tokens", "prompt_tokens needs one number for each response")
        choices: list[CompletionChoice] = []
        for answer in answers:
            for choice in answer.choices:
                one = _completion(choice, await self._text(asked, choice))
                choices.append({**one, "index": len(choices)})
        generated = sum(len(c.token_ids or ()) for answer in answers for c in answer.choices)
        total: Usage = usage(sum(counts), generated, None)
        completion: Completion = {**head, "choices": choices, "usage": total}
        return json_response(completion)

    async def _whole_chat(
        self, request: Request, body: ChatRequest, choices: Sequence[TokenChoice], prompt: int
    ) -> ChatCompletion:
        """Convert tokens that the model generated for a request to its answer."""
        job = await self._job(request, body, runs=False)
        messages = []
        for choice in choices:
            text = await self._turn_text(job, choice, choice.token_ids or ())
            parser = job.turn.parser()
            message = Message(
                index=choice.index,
                parsed=assemble([*parser.feed(text), *parser.finish()]),
                generated=len(choice.token_ids or ()),
                token_ids=choice.token_ids or (),
                logprobs=None,
                finish_reason=choice.finish_reason or "stop",
                stop_reason=choice.stop_reason,
            )
            messages.append(message)
        return {
            "id": job.id,
            "object": "chat.completion",
            "created": job.created,
            "model": job.model,
            "system_fingerprint": fingerprint(self._context.config, self._context.engine),
            "choices": [self._choice(job, message) for message in messages],
            "usage": usage(prompt, sum(message.generated for message in messages), None),
        }

    async def _chat_chunk(
        self, request: Request, body: ChatRequest, before: Sequence[int], choice: TokenChoice
    ) -> ChatChunk:
        """Convert further tokens of a choice to a chunk. before: its tokens so far."""
        job = await self._job(request, body, runs=False)
        parser, deltas = job.turn.parser(), ChatDeltas(job)
        earlier = await self._turn_text(job, TokenChoice(), before)
        ids = [*before, *(choice.token_ids or ())]
        text = await self._turn_text(job, choice, ids)
        deltas.convert(parser.feed(earlier))
        events = parser.feed(text[len(earlier) :])
        reason = choice.finish_reason
        events += [] if reason is None else parser.finish()
        made: ChatChunkChoice = {
            "index": choice.index,
            "delta": deltas.convert(events),
            "logprobs": None,
            "finish_reason": None if reason is None else reason_of(job, reason, deltas.called),
        }
        if reason is not None:
            made["stop_reason"] = choice.stop_reason
        opening = [] if before else [opening_of(job, choice.index)]
        return {**self._head(job), "choices": [*opening, made]}

    async def _turn_text(self, job: ChatJob, choice: TokenChoice, ids: Sequence[int]) -> str:
        params = job.turn.engine_params()
        return await self._decoded(
            choice, ids, skip_special=params.skip_special_tokens,
            with_stop=bool(job.body.include_stop_str_in_output),
        )  # fmt: skip

    async def _decoded(
        self, choice: TokenChoice, ids: Sequence[int], *, skip_special: bool, with_stop: bool
    ) -> str:
        """Decode tokens of a choice, without what ended it and without a part of a character."""
        tokenizer = self._generation.tokenizer
        stop = choice.stop_reason
        if choice.finish_reason == "stop" and ids and not with_stop:
            ended = stop == ids[-1] if isinstance(stop, int) else ids[-1] in tokenizer.stop_ids
            ids = ids[:-1] if ended and not isinstance(stop, str) else ids
        text = await self._generation.text_of(ids, "token_ids", skip_special_tokens=skip_special)
        if isinstance(stop, str) and stop and not with_stop and stop in text:
            text = text[: text.rindex(stop)]
        return text if choice.finish_reason is not None else text.rstrip("\ufffd")

    async def _text(
        self, body: CompletionRequest, choice: TokenChoice, ids: Sequence[int] | None = None
    ) -> str:
        return await self._decoded(
            choice, choice.token_ids or () if ids is None else ids,
            skip_special=body.skip_special_tokens is not False,
            with_stop=bool(body.include_stop_str_in_output),
        )  # fmt: skip


def _one(body: _Request) -> tuple[TokenChoice, list[int]]:
    """The choice of a chunk, and its tokens before. Raises ApiError(400)."""
    chunk = body.generate_chunk
    if chunk is None or len(chunk.choices) != 1:
        raise bad_field("generate_chunk", "generate_chunk must be a chunk with one choice")
    return chunk.choices[0], [] if body.stream_state is None else body.stream_state.token_ids


def _count(value: int | None) -> int:
    return value or 0


def _completion(choice: TokenChoice, text: str) -> CompletionChoice:
    return {
        "index": choice.index,
        "text": text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
