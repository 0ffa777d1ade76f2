"""The route family of llama.cpp's server: `/completion`, `/infill`, `/props`, `/slots` ...

With `response_fields`, a response has only the named fields, and no static type.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import msgspec
from attrs import frozen
from fastapi import APIRouter, Request
from starlette.responses import Response

import modulm
from modulm_route_llama_cpp.answers import Answer, chosen_fields, failure
from modulm_route_llama_cpp.objects import (
    Adapter,
    Chunk,
    Completion,
    Embedding,
    Failure,
    Piece,
    Properties,
    Slot,
    Tokens,
)
from modulm_route_llama_cpp.prompts import biases, infill_prompt, prompts_of
from modulm_route_llama_cpp.schema import (
    CompletionRequest,
    EmbeddingRequest,
    InfillRequest,
    Settings,
    TemplateRequest,
    constraint_of,
    params_of,
)
from modulm_server.auth import current_owner, may_use, usable_adapters
from modulm_server.constraints import check_tools
from modulm_server.errors import ApiError, error_body
from modulm_server.flags import ServerConfig
from modulm_server.generation import Running, abandon, merged
from modulm_server.json_body import bad_field, json_response, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.prompts import ChatOptions, Prompt
from modulm_server.request_cost import check_cost
from modulm_server.route import RouteFamily
from modulm_server.sse import EventStream, frame

if TYPE_CHECKING:
    from modulm.contracts.sampling import SamplingParams

__all__ = ["LlamaCpp"]

#: Answers that are put together in a turn of the event loop.
_AT_ONCE = 32


@frozen(kw_only=True)
class _Job:
    """A validated request. fields: the API's names of engine fields."""

    body: CompletionRequest
    prompts: Sequence[Prompt]
    params: SamplingParams
    settings: Mapping[str, Any]
    model: str
    adapter: str | None
    fields: Mapping[str, str]

    def answers(self) -> list[Answer]:
        """Create an `Answer` per prompt and completion."""
        return [
            Answer(
                index,
                self.model,
                self.settings,
                nothing=self.body.n_predict == 0,
                best=self.body.n_probs,
                keep_tokens=self.body.return_tokens or self.body.stream,
            )
            for index in range(len(self.prompts) * self.params.n)
        ]


class LlamaCpp(RouteFamily):
    """`/completion`, `/infill`, `/props`, `/slots`, `/apply-template`, `/embedding` ..."""

    name = "llama_cpp"
    api = 2

    def failure(self, error: ApiError) -> Any:
        """See `RouteFamily.failure`."""
        return _failure(error)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["llama.cpp"])
        whole = Completion | list[Completion] | dict[str, Any] | list[dict[str, Any]]
        part = Chunk | Completion | Failure | dict[str, Any]
        post_routes = (
            ("/completion", self.completion, CompletionRequest, whole, part),
            ("/infill", self.infill, InfillRequest, whole, part),
            ("/apply-template", self.apply_template, TemplateRequest, Tokens, None),
            ("/embedding", self.embedding, EmbeddingRequest, list[Embedding], None),
        )
        for path, function, schema, answer, events in post_routes:
            router.add_api_route(
                path,
                self.with_errors(function),
                methods=["POST"],
                openapi_extra=request_docs(schema),
                responses=response_docs(answer, events=events, failure=Failure),
                description=function.__doc__,
                name=f"llama.cpp {path}",
            )
        for path, get_endpoint, shape in (
            ("/props", self.props, Properties),
            ("/slots", self.slots, list[Slot]),
            ("/lora-adapters", self.adapters, list[Adapter]),
        ):
            router.add_api_route(
                path,
                self.with_errors(get_endpoint),
                methods=["GET"],
                responses=response_docs(shape, failure=Failure),
                description=get_endpoint.__doc__,
                name=f"llama.cpp {path}",
            )
        for path in ("/props", "/slots/{id_slot}", "/lora-adapters"):
            router.add_api_route(
                path,
                self.with_errors(self._not_changeable),
                methods=["POST"],
                include_in_schema=False,
            )
        return router

    def error_response(self, error: ApiError) -> Response:
        return json_response(_failure(error), error.status, error.headers)

    def error_frames(self, body: bytes) -> bytes:
        return b"data: " + body + b"\n\n"

    # Server information.

    async def props(self, request: Request) -> Response:
        """Describe the server and the default settings of requests."""
        info, config = self.context.engine.info, self.context.config
        tokenizer = self.context.engine.tokenizer
        settings = Settings.of(CompletionRequest(), info.defaults).as_dict()
        template = self.context.generation.template
        if template is None and tokenizer is not None:
            templates = tokenizer.chat_template
            template = templates if isinstance(templates, str) else (templates or {}).get("default")
        special = {} if tokenizer is None else tokenizer.special
        properties: Properties = {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": info.max_model_len,
                "speculative": info.limit("drafts", "drafts") > 0,
                "is_processing": False,
                "params": {"n_predict": -1, "seed": 2**32 - 1, "stop": [], **settings},
            },
            "total_slots": config.scheduler.max_num_seqs or 1,
            "model_alias": self.context.models[0],
            "model_path": self.context.models[0],
            "chat_template": template or "",
            "chat_template_caps": {},
            "modalities": {"vision": False, "audio": False},
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "build_info": f"modulm {modulm.__version__}",
            "is_sleeping": await self.context.engine.is_sleeping(),
        }
        return json_response(properties)

    async def slots(self, request: Request) -> Response:
        """List the slots for concurrent sequences. fail_on_no_slot=1: 503 if all are in use."""
        info, stats = self.context.engine.info, self.context.engine.stats
        count = self.context.config.scheduler.max_num_seqs or 1
        running = 0 if stats is None else int(stats.running)
        if request.query_params.get("fail_on_no_slot") == "1" and running >= count:
            raise ApiError(503, "no slot available", code="overloaded")
        slot_objects: list[Slot] = [
            {
                "id": index,
                "id_task": -1,
                "n_ctx": info.max_model_len,
                "speculative": info.limit("drafts", "drafts") > 0,
                "is_processing": index < running,
            }
            for index in range(count)
        ]
        return json_response(slot_objects)

    async def adapters(self, request: Request) -> Response:
        """List the adapters that requests may select by number in `lora`."""
        adapter_objects: list[Adapter] = [
            {"id": index, "path": adapter.root or adapter.name, "scale": 0.0}
            for index, adapter in enumerate(usable_adapters(self.context.engine).values())
        ]
        return json_response(adapter_objects)

    async def _not_changeable(self, request: Request) -> Response:
        """Reject requests that change llama.cpp's server at run time."""
        reasons = {
            "/props": "set the server's flags instead (modulm serve --help)",
            "/lora-adapters": "select an adapter in each request, with `lora` or `model`",
        }
        path = request.url.path
        reason = reasons.get(path, "the prompt cache is shared by all slots and cannot be saved")
        raise ApiError(501, f"this server does not support POST {path[:40]}: {reason}")

    async def apply_template(self, request: Request) -> Response:
        """Render a conversation with the model's chat template."""
        body = await read(request, TemplateRequest)
        prompt = await self.context.generation.from_messages(
            body.messages,
            ChatOptions(
                tools=check_tools(body.tools),
                variables=body.chat_template_kwargs or {},
                add_generation_prompt=body.add_generation_prompt,
            ),
        )
        rendered: Tokens = {"prompt": await self._text(prompt.text, prompt.ids)}
        return json_response(rendered)

    async def embedding(self, request: Request) -> Response:
        """Compute one embedding per text."""
        body = await read(request, EmbeddingRequest)
        if body.embd_normalize not in (None, 2, -1):
            raise bad_field("embd_normalize", "embd_normalize must be 2 (Euclidean) or -1 (none)")
        request_fields: dict[str, Any] = {"input": body.content}
        if body.embd_normalize == -1:
            request_fields["normalize"] = False
        encoded = msgspec.json.encode(request_fields)
        status, answer = await self.context.loopback.post(
            "/v1/embeddings", encoded, current_owner()
        )
        response = json.loads(answer)
        if status >= 300:
            error = response.get("error", {})
            raise ApiError(status, str(error.get("message", "error")), param=error.get("param"))
        embeddings: list[Embedding] = [
            {"index": one["index"], "embedding": [one["embedding"]]} for one in response["data"]
        ]
        return json_response(embeddings)

    # Generation.

    async def completion(self, request: Request) -> Response:
        """Continue a prompt, or each of several."""
        body = await read(request, CompletionRequest)
        if body.prompt is None:
            raise bad_field("prompt", "prompt is missing")
        self.context.generation.check_open()
        return await self._answer(body, await prompts_of(body.prompt, self.context.generation))

    async def infill(self, request: Request) -> Response:
        """Fill the gap between a prefix and a suffix."""
        body = await read(request, InfillRequest)
        self.context.generation.check_open()
        prompt = await infill_prompt(body, self.context.generation)
        return await self._answer(body, (prompt,))

    async def _answer(self, body: CompletionRequest, prompts: Sequence[Prompt]) -> Response:
        job = await self._job(body, prompts)
        runs = await self._start(job)
        if body.stream:
            quiet = self.context.config.group(ServerConfig).sse_keep_alive_interval
            if body.sse_ping_interval is not None:
                quiet = max(body.sse_ping_interval, 0.0)
            return EventStream(self._frames(job, runs), quiet=quiet, failed=_failed)
        return json_response(await self._whole(job, runs))

    async def _job(self, body: CompletionRequest, prompts: Sequence[Prompt]) -> _Job:
        info = self.context.engine.info
        slots = self.context.config.scheduler.max_num_seqs or 1
        if not -1 <= body.id_slot < slots:
            raise bad_field("id_slot", f"id_slot must be -1 or a slot from 0 to {slots - 1}")
        settings = Settings.of(body, info.defaults)
        constraint = constraint_of(body)
        generation = self.context.generation
        bias = await generation.work.run(
            _size_of(body.logit_bias), biases, body.logit_bias, generation.tokenizer
        )
        params = params_of(body, settings, None if constraint is None else constraint[0], bias)
        server = self.context.config.group(ServerConfig)
        check_cost(params, [len(prompt.ids) for prompt in prompts], info, server)
        adapter = await self._adapter(body)
        settings_object = {
            **settings.as_dict(),
            "n_ctx": info.max_model_len,
            "n_predict": -1 if params.max_tokens is None else params.max_tokens,
            "max_tokens": -1 if params.max_tokens is None else params.max_tokens,
            "seed": 2**32 - 1 if params.seed is None else params.seed,
            "stop": list(params.stop),
            "ignore_eos": body.ignore_eos,
            "stream": body.stream,
            "n_probs": body.n_probs,
            "grammar": body.grammar or "",
            "n_keep": body.n_keep or 0,
            "logit_bias": [{"token": key, "bias": value} for key, value in (bias or {}).items()],
        }
        if constraint is not None and constraint[1] == "json_schema":
            settings_object["json_schema"] = body.json_schema
        return _Job(
            body=body,
            prompts=prompts,
            params=params,
            settings=settings_object,
            model=adapter or self.context.models[0],
            adapter=adapter,
            fields={
                "logprobs": "n_probs",
                "max_tokens": "n_predict",
                **({} if constraint is None else {"structured_outputs": constraint[1]}),
            },
        )

    async def _adapter(self, body: CompletionRequest) -> str | None:
        """The adapter of a request, from `lora` or `model`."""
        if body.lora is None:
            model_name = body.model
            if model_name is None or model_name in self.context.models:
                return None
            adapter = self.context.engine.adapters.get(model_name)
            return None if adapter is None or not may_use(adapter) else model_name
        requested = [one for one in body.lora if one.get("scale", 0) != 0]
        if len(requested) > 1 or any(one.get("scale") != 1 for one in requested):
            raise bad_field("lora", "lora: only one adapter with scale 1 is supported")
        if not requested:
            return None
        names = list(usable_adapters(self.context.engine))
        index = requested[0].get("id")
        if not isinstance(index, int) or not 0 <= index < len(names):
            raise bad_field("lora", f"lora: {index!r:.20} is not an adapter of GET /lora-adapters")
        return names[index]

    async def _start(self, job: _Job) -> list[Running]:
        """Submit all prompts to the engine, or none."""
        salt = None if job.body.cache_prompt else uuid4().hex
        tasks = [
            asyncio.ensure_future(
                self.context.generation.generate(
                    prompt, job.params, cache_salt=salt, adapter=job.adapter, fields=job.fields
                )
            )
            for prompt in job.prompts
        ]
        try:
            await asyncio.wait(tasks)
            return [task.result() for task in tasks]
        except BaseException:
            abandon(tasks)
            raise

    async def _text(self, text: str | None, ids: Sequence[int]) -> str:
        if text is not None:
            return text
        generation = self.context.generation
        decoded = await generation.work.run(
            len(ids), lambda: generation.tokenizer.decode(list(ids), False)
        )
        return str(decoded)

    async def _whole(self, job: _Job, runs: Sequence[Running]) -> Any:
        answers = job.answers()
        async with AsyncExitStack() as stack:
            for run in runs:
                stack.push_async_callback(run.aclose)
            outputs = await self.context.generation.last_outputs(runs)
        completions = []
        for prompt_index, output in enumerate(outputs):
            if prompt_index % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            for choice in output.outputs:
                answer = answers[prompt_index * job.params.n + choice.index]
                if output.metrics is not None and output.metrics.first_token_time is not None:
                    answer.first = output.metrics.first_token_time
                prompt = await self._text(output.prompt, output.prompt_token_ids)
                completion = answer.end(answer.piece(output, choice), output, choice, prompt)
                completions.append(chosen_fields(completion, job.body.response_fields))
        return completions[0] if len(completions) == 1 else completions

    async def _frames(self, job: _Job, runs: Sequence[Running]) -> AsyncGenerator[bytes, None]:
        answers = job.answers()
        async with AsyncExitStack() as stack:
            for run in runs:
                stack.push_async_callback(run.aclose)
            async for prompt_index, output in merged(runs):
                for choice in output.outputs:
                    answer = answers[prompt_index * job.params.n + choice.index]
                    for part in await self._pieces(job, answer, output, choice):
                        yield frame(part)

    async def _pieces(
        self, job: _Job, answer: Answer, output: Any, choice: Any
    ) -> list[Mapping[str, Any]]:
        """The stream parts of an output: its text, and the end if it is finished."""
        first = answer.first is None
        piece = cast("Chunk", answer.piece(output, choice))
        if job.body.timings_per_token:
            piece["timings"] = answer.timings(output)
        parts: list[Mapping[str, Any]] = []
        if first and job.body.return_progress:
            total, cached = len(output.prompt_token_ids), output.num_cached_tokens or 0
            took = answer.timings(output)["prompt_ms"]
            progress = {"total": total, "cache": cached, "processed": total, "time_ms": took}
            parts.append({**piece, "content": "", "tokens": [], "prompt_progress": progress})
        if piece["content"] or piece["tokens"]:
            parts.append(piece)
        if choice.finish_reason is not None:
            prompt = await self._text(output.prompt, output.prompt_token_ids)
            last: Piece = {**_plain(piece), "content": "", "tokens": []}
            ended = answer.end(last, output, choice, prompt)
            parts.append(chosen_fields(ended, job.body.response_fields))
        return parts


def _size_of(bias: Any) -> int:
    """Estimate the cost of biases in characters of text."""
    return 16 * len(bias) if isinstance(bias, list | dict) else 0


def _plain(piece: Chunk) -> Piece:
    """The fields of a part that the final part repeats."""
    return {
        "index": piece["index"],
        "content": piece["content"],
        "tokens": piece["tokens"],
        "stop": False,
        "id_slot": piece["id_slot"],
        "tokens_predicted": piece["tokens_predicted"],
        "tokens_evaluated": piece["tokens_evaluated"],
    }


def _failure(error: ApiError) -> dict[str, Any]:
    return failure(error, error_body(error)["error"]["message"])


def _failed(error: ApiError) -> bytes:
    return frame(_failure(error))
