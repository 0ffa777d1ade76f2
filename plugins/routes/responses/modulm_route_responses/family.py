"""The route family: requests in, responses or events out."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import field, frozen
from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm.contracts.route import RouteFamily
from modulm.server.auth import owner_of
from modulm.server.desk import ChatOptions
from modulm.server.errors import ApiError, describe
from modulm.server.sampling import not_yet
from modulm.server.sse import EventStream, event, until_gone
from modulm.server.talk import Parsers, Turn
from modulm.server.wire import bad_field, json_response, read
from modulm_route_responses.output import Output
from modulm_route_responses.schema import (
    ResponsesRequest,
    choice_of,
    constraint_of,
    messages_of,
    params_of,
    tools_of,
)
from modulm_route_responses.store import Store, Stored

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from modulm.server.talk import Started

__all__ = ["Responses"]


@frozen
class _Job:
    """One request, ready to run; `stored.body` is the response as it grows."""

    turn: Turn
    stored: Stored
    output: Output = field(factory=Output)
    keep: bool = True

    @property
    def body(self) -> dict[str, Any]:
        return self.stored.body


class Responses(RouteFamily):
    """`/v1/responses`."""

    name = "responses"
    api = 1

    def router(self) -> APIRouter:
        self._parsers = Parsers.of(self.context.config)
        self._store = Store()
        router = APIRouter(prefix="/v1/responses", tags=["Responses"])
        router.add_api_route("", self.create, methods=["POST"])
        router.add_api_route("/{response_id}", self.retrieve, methods=["GET"])
        router.add_api_route("/{response_id}", self.delete, methods=["DELETE"])
        router.add_api_route("/{response_id}/cancel", self.cancel, methods=["POST"])
        return router

    async def stop(self) -> None:
        await self._store.stop()

    async def create(self, request: Request) -> Response:
        """Answer."""
        body = await read(request, ResponsesRequest)
        job = await self._job(request, body)
        if body.background:
            job.body["status"] = "queued"
            self._store.put(job.stored)
            job.stored.task = asyncio.get_running_loop().create_task(self._behind(job))
            return json_response(job.body)
        started = await job.turn.start()
        if body.stream:
            quiet = self.context.config.frontend.sse_keep_alive_interval
            return EventStream(self._frames(job, started), quiet=quiet, failed=_failed)
        await until_gone(self._whole(job, started), request.receive)
        return json_response(job.body)

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """A response that was stored."""
        if request.query_params.get("stream") == "true":
            raise bad_field("stream", "stream: a stored response cannot be streamed yet")
        return json_response(self._store.get(response_id, owner_of(request)).body)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Forget a response."""
        stored = self._store.get(response_id, owner_of(request))
        if stored.task is not None:
            stored.task.cancel()
        self._store.remove(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, response_id: str) -> Response:
        """End a response that is made in the background."""
        stored = self._store.get(response_id, owner_of(request))
        if not stored.body["background"]:
            raise ApiError(400, "only a response in the background can be cancelled")
        if stored.task is not None:
            stored.task.cancel()
            await asyncio.gather(stored.task, return_exceptions=True)
        return json_response(stored.body)

    # Reading the request.

    async def _job(self, request: Request, body: ResponsesRequest) -> _Job:
        desk = self.context.desk
        model = desk.model(body.model)
        desk.check_open()
        _refuse(body)
        owner = owner_of(request)
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            name = body.previous_response_id
            before = self._store.get(name, owner, "previous_response_id").messages
        messages = [*before, *messages_of(body.input)]
        turn = await self._turn(body, messages)
        stored = Stored(owner, _response(body, model, turn), messages)
        output = Output(single=body.parallel_tool_calls is False)
        return _Job(turn, stored, output, keep=body.store is not False)

    async def _turn(self, body: ResponsesRequest, messages: list[dict[str, Any]]) -> Turn:
        tools = tools_of(body)
        choice = choice_of(body, tools)
        found = constraint_of(body, tools, choice)
        variables = dict(body.chat_template_kwargs or {})
        effort = (body.reasoning or {}).get("effort")
        if effort is not None:
            variables.setdefault("reasoning_effort", effort)
        system = [] if body.instructions is None else [_system(body.instructions)]
        turn = Turn(
            desk=self.context.desk,
            prompt=await self.context.desk.from_messages(
                [*system, *messages], ChatOptions(tools=tools, variables=variables)
            ),
            params=params_of(
                body, self.context.engine.info.defaults, None if found is None else found[1]
            ),
            parsers=self._parsers,
            tools=tools,
            tool_choice=choice,
            template_kwargs=variables,
            fields={
                "prompt": "input",
                "messages": "input",
                "max_tokens": "max_output_tokens",
                "structured_outputs": found[0] if found else "",
            },
        )
        turn.check()
        return turn

    # Running it.

    async def _behind(self, job: _Job) -> None:
        """A response in the background: its end is kept, whatever it is."""
        job.body["status"] = "in_progress"
        try:
            await self._whole(job, await job.turn.start())
        except asyncio.CancelledError:
            job.body["status"] = "cancelled"
            raise
        except Exception as error:
            told = describe(error, job.body["id"])
            job.body["status"] = "failed"
            job.body["error"] = {"code": told.code or "server_error", "message": told.message}
        finally:
            job.stored.task = None

    async def _whole(self, job: _Job, started: Started) -> None:
        output, messages = await started.messages()
        for _ in job.output.feed(messages[0].parsed.deltas):
            pass
        self._finish(job, output, messages[0].finish_reason, len(messages[0].token_ids))

    def _finish(self, job: _Job, output: Any, reason: str, generated: int) -> list[dict[str, Any]]:
        """Complete the response, keep it; what closing the last item sends."""
        cut = reason == "length"
        status = "incomplete" if cut else "completed"
        last = list(job.output.close(status))
        body = job.body
        body["status"] = status
        body["completed_at"] = int(time.time())
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        body["output"] = job.output.items
        body["usage"] = _usage(output, generated)
        job.stored.messages += messages_of(job.output.items) if job.output.items else []
        if job.keep:
            self._store.put(job.stored)
        return last

    async def _frames(self, job: _Job, started: Started) -> AsyncGenerator[bytes, None]:
        number = 0

        def named(value: dict[str, Any]) -> bytes:
            nonlocal number
            data = event(value["type"], {**value, "sequence_number": number})
            number += 1
            return data

        yield named({"type": "response.created", "response": job.body})
        yield named({"type": "response.in_progress", "response": job.body})
        async for output, steps in started.steps():
            for step in steps:
                for value in job.output.feed(step.events):
                    yield named(value)
                if step.finish_reason is None:
                    continue
                for value in self._finish(job, output, step.finish_reason, step.generated):
                    yield named(value)
                yield named({"type": f"response.{job.body['status']}", "response": job.body})


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _failed(told: ApiError) -> bytes:
    error = {"code": told.code, "message": told.message, "param": told.param}
    return event("error", {"type": "error", **error, "sequence_number": 0})


def _refuse(body: ResponsesRequest) -> None:
    """What is understood but not there."""
    not_yet(body, "conversation", "prompt", "max_tool_calls", "top_logprobs")
    if body.include and set(body.include) - {"reasoning.encrypted_content"}:
        raise bad_field("include", "include: nothing more can be included yet")
    if body.truncation not in (None, "disabled"):
        raise bad_field("truncation", "truncation: disabled is the only choice")
    if body.background and body.store is False:
        raise bad_field("store", "store: a response in the background must be stored")
    if body.background and body.stream:
        raise bad_field("stream", "stream: a response in the background cannot be streamed yet")
    if body.service_tier not in (None, "auto", "default"):
        raise bad_field("service_tier", "service_tier: auto or default")


def _response(body: ResponsesRequest, model: str, turn: Turn) -> dict[str, Any]:
    """The response before anything was said."""
    params = turn.params
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": body.reasoning,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _usage(output: Any, generated: int) -> dict[str, Any]:
    prompt = len(output.prompt_token_ids)
    cached = {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0}
    return {
        "input_tokens": prompt,
        "input_tokens_details": cached,
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }
