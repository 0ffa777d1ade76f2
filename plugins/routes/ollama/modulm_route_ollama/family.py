"""The route family of Ollama's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import evolve, field, frozen
from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm_parsing import ParsedMessage
from modulm_route_ollama.answers import Clock, Pieces, call_of, line, logprobs_of, now, reason_of
from modulm_route_ollama.library import Library, Steps
from modulm_route_ollama.modelfile import parameters_of, read_modelfile
from modulm_route_ollama.models import Catalogue
from modulm_route_ollama.objects import (
    ChatAnswer,
    Embedding,
    Embeddings,
    Failure,
    GenerateAnswer,
    Models,
    ModelShown,
    RunningModels,
    Status,
    Version,
)
from modulm_route_ollama.schema import (
    AnyRequest,
    ChatRequest,
    CopyRequest,
    CreateRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    NamedRequest,
    constraint_of,
    messages_of,
    params_of,
    variables_of,
    with_images,
)
from modulm_server.auth import current_owner, owner_of
from modulm_server.chat_turn import ChatTurn, Parsers
from modulm_server.constraints import check_tools
from modulm_server.errors import ApiError, error_body
from modulm_server.forced_calls import force_calls
from modulm_server.json_body import bad_field, convert, json_response, read, request_docs
from modulm_server.models.library import hub_id
from modulm_server.openapi import response_docs
from modulm_server.prompts import ChatOptions, Prompt
from modulm_server.route import RouteFamily
from modulm_server.sse import EventStream

if TYPE_CHECKING:
    from modulm_server.chat_turn import RunningTurn
    from modulm_server.route import RouteContext

__all__ = ["Ollama"]

_LINES = "application/x-ndjson"
#: Routes of the library of models, which the front end answers.
_OF_A_LIBRARY = ("/create", "/copy", "/delete", "/pull", "/push", "/blobs/{digest}")
#: Routes that stream by default.
_STREAMED = ("/chat", "/generate", "/create", "/pull", "/push")


@frozen(kw_only=True)
class _Job:
    """A validated request. chat: respond with a message, else with a text."""

    model: str
    chat: bool
    stream: bool
    turn: ChatTurn
    clock: Clock = field(factory=Clock)

    def piece(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A part of the response, in the form of its route."""
        head = {"model": self.model, "created_at": now(), "done": False}
        if self.chat:
            return {**head, "message": {"role": "assistant", **message}}
        thought = {"thinking": message["thinking"]} if "thinking" in message else {}
        return {**head, "response": message["content"], **thought}


class Ollama(RouteFamily):
    """`/api/chat`, `/api/generate`, `/api/embed`, `/api/tags`, `/api/show`, `/api/ps` ..."""

    name = "ollama"
    api = 2
    shared_paths = (
        "/api/tags", "/api/ps", "/api/version", *(f"/api{path}" for path in _OF_A_LIBRARY)
    )  # fmt: skip
    cold_paths = ("/api/show",)

    def __init__(self, context: RouteContext) -> None:
        super().__init__(context)
        self._library = Library(context)
        if self._library.writable:
            self.upload_paths = ("/api/blobs/",)

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/api", tags=["Ollama"])
        self._parsers = Parsers.of(self.context.config)
        self._catalogue = Catalogue(self.context, self._library)
        post_routes: tuple[tuple[str, Any, type[msgspec.Struct], Any], ...] = (
            ("/chat", self.chat, ChatRequest, ChatAnswer),
            ("/generate", self.generate, GenerateRequest, GenerateAnswer),
            ("/embed", self.embed, EmbedRequest, Embeddings),
            ("/embeddings", self.embeddings, EmbeddingsRequest, Embedding),
            ("/show", self.show, NamedRequest, ModelShown),
            ("/create", self.create, CreateRequest, Status),
            ("/copy", self.copy, CopyRequest, None),
            ("/delete", self.delete, NamedRequest, None),
            ("/pull", self.pull, NamedRequest, Status),
            ("/push", self.push, NamedRequest, Status),
        )
        for path, function, schema, answer in post_routes:
            streamed = answer | Failure if path in _STREAMED else None
            router.add_api_route(
                path,
                self.with_errors(function),
                methods=["DELETE" if path == "/delete" else "POST"],
                openapi_extra=request_docs(schema),
                responses=response_docs(answer, lines=streamed, failure=Failure),
                description=function.__doc__,
                name=f"ollama {path}",
            )
        get_routes = (("/tags", self.tags, Models), ("/ps", self.ps, RunningModels),
                 ("/version", self.version, Version))  # fmt: skip
        for path, answer_of, shape in get_routes:
            router.add_api_route(
                path, answer_of, methods=["GET"], responses=response_docs(shape, failure=Failure)
            )
        for method in ("HEAD", "POST"):
            router.add_api_route(
                "/blobs/{digest}",
                self.with_errors(self.blob),
                methods=[method],
                include_in_schema=False,
                name=f"ollama {method} blobs",
            )
        return router

    def error_response(self, error: ApiError) -> Response:
        return json_response(_failure(error), error.status, error.headers)

    def error_frames(self, body: bytes) -> None:
        return None

    # Models.

    async def tags(self, request: Request) -> Response:
        """List the models."""
        models: Models = {"models": self._catalogue.list_models(owner_of(request))}
        return json_response(models)

    async def ps(self, request: Request) -> Response:
        """List the running models: those in memory, on a server of several."""
        return json_response(self._catalogue.running(owner_of(request)))

    async def version(self) -> Response:
        """The version of Ollama's API that is served, and that of this server."""
        return json_response(self._catalogue.version())

    async def show(self, request: Request) -> Response:
        """Describe a model."""
        body = await read(request, NamedRequest, typed=False)
        name = body.model or body.name or ""
        directory = self.context.directory
        if directory is not None:
            return json_response(
                self._catalogue.cold_details(directory.status(name, owner_of(request)))
            )
        await self._served(name)
        return json_response(self._catalogue.model_details(name))

    # The library of models.

    async def create(self, request: Request) -> Response:
        """Create a model from another one or from uploaded files, as a Modelfile says."""
        self._library.check_writable()
        body = await read(request, CreateRequest, typed=False)
        name = self._library.target(body.model or body.name)
        if body.messages:
            raise bad_field("messages", "messages are not supported: send them with each request")
        modelfile = read_modelfile(body.modelfile or "")
        modelfile.base = body.base or modelfile.base
        modelfile.system = body.system or modelfile.system
        modelfile.template = body.template or modelfile.template
        modelfile.parameters |= parameters_of(body.parameters)
        modelfile.quantize = body.quantize
        texts = body.license or []
        modelfile.license += [texts] if isinstance(texts, str) else texts
        if body.adapters:
            modelfile.adapter = "./adapter"
        steps = self._library.create(name, modelfile, body.files, body.adapters, owner_of(request))
        return await self._progress(steps, body.stream)

    async def copy(self, request: Request) -> Response:
        """Copy a model. The copy needs no more room."""
        self._library.check_writable()
        body = await read(request, CopyRequest, typed=False)
        target = self._library.target(body.destination, "destination")
        await self._library.copy(body.source.removesuffix(":latest"), target, owner_of(request))
        return Response(status_code=200)

    async def delete(self, request: Request) -> Response:
        """Unload a model when its running requests have ended, and remove its files."""
        self._library.check_writable()
        body = await read(request, NamedRequest, typed=False)
        await self._library.delete(body.model or body.name or "", owner_of(request))
        return Response(status_code=200)

    async def pull(self, request: Request) -> Response:
        """Download a model from the hub. A server whose models cannot be changed succeeds for those
        that it has.
        """
        body = await read(request, NamedRequest, typed=False)
        name = body.model or body.name or ""
        if self._library.writable:
            return await self._progress(self._library.pull(name), body.stream)
        if self.context.directory is not None:
            self.context.directory.status(name, owner_of(request))
        else:
            await self._served(name)
        done: Status = {"status": "success"}
        if body.stream:
            return Response(line(done), 200, media_type=_LINES)
        return json_response(done)

    async def push(self, request: Request) -> Response:
        """Upload a model to the hub, with the server's token."""
        self._library.check_writable()
        body = await read(request, NamedRequest, typed=False)
        name = self._library.target(body.model or body.name)
        self._library.check_known(name, owner_of(request))
        return await self._progress(self._library.push(name), body.stream)

    async def blob(self, request: Request) -> Response:
        """Store an uploaded file, or tell whether it is stored."""
        self._library.check_writable()
        digest = request.path_params["digest"]
        if request.method == "HEAD":
            return Response(status_code=200 if self._library.has_blob(digest) else 404)
        size = request.headers.get("content-length", "")
        length = int(size) if size.isdigit() else None
        await self._library.upload(digest, request.stream(), length)
        return Response(status_code=201)

    async def _progress(self, steps: Steps, stream: bool) -> Response:
        """Respond with each status, or with the last one."""
        last = await anext(steps)
        if stream:
            return EventStream(_status_lines(last, steps), media=_LINES, failed=_failed)
        async with aclosing(steps):
            async for step in steps:
                last = step
        return json_response(last)

    async def _served(self, name: str) -> str | None:
        """Check a model's name, ignoring the tag ":latest"; returns the adapter of an adapter's
        name. Raises ApiError(404).
        """
        generation = self.context.generation
        plain = name.removesuffix(":latest")
        for one in dict.fromkeys((plain, name, hub_id(plain) or plain)):
            with suppress(ApiError):
                return (await generation.find_model(one)).adapter
        models = ", ".join(generation.models)
        raise ApiError(
            404,
            f"model {name[:256]!r} is not served here, only {models}; a server serves only the "
            "model that it was started with (modulm serve MODEL)",
            param="model",
            code="model_not_found",
        )

    # Generation.

    async def chat(self, request: Request) -> Response:
        """Generate the next message of a conversation."""
        body = await read(request, ChatRequest, typed=False)
        adapter = await self._served(body.model)
        if not body.messages:
            return self._empty_answer(body, {"message": {"role": "assistant", "content": ""}})
        generation = self.context.generation
        generation.check_open()
        tools = check_tools(body.tools)
        choice = "auto" if tools else "none"
        forced_calls = force_calls(choice, tools, self._parsers, generation.tokenizer)
        constraint = forced_calls.combine(format=constraint_of(body.format))
        variables = variables_of(body.think, self._parsers.reasoning)
        prompt = await generation.from_messages(
            await convert(request, messages_of, body.messages),
            ChatOptions(tools=tools, variables=variables),
        )
        turn = self._turn(
            body,
            prompt,
            None if constraint is None else constraint[1],
            parsers=self._parsers,
            tools=tools,
            tool_choice=choice,
            calls_by_grammar=forced_calls.in_model_format,
            template_kwargs=variables,
            adapter=adapter,
        )
        return await self._respond(_Job(model=body.model, chat=True, stream=body.stream, turn=turn))

    async def generate(self, request: Request) -> Response:
        """Complete a prompt, by default in the model's chat template."""
        body = await read(request, GenerateRequest, typed=False)
        adapter = await self._served(body.model)
        if not body.prompt and not body.context:
            return self._empty_answer(body, {"response": ""})
        self.context.generation.check_open()
        _check_supported(body)
        variables = variables_of(body.think, self._parsers.reasoning)
        templated = not body.raw and self._has_template
        turn = self._turn(
            body,
            await self._prompt(body, templated, variables),
            constraint_of(body.format),
            parsers=Parsers(None, self._parsers.reasoning) if templated else Parsers(),
            template_kwargs=variables,
            adapter=adapter,
        )
        job = _Job(model=body.model, chat=False, stream=body.stream, turn=turn)
        return await self._respond(job)

    @property
    def _has_template(self) -> bool:
        tokenizer = self.context.generation.tokenizer
        template = self.context.generation.template or tokenizer.chat_template
        return bool(template or tokenizer.chat)

    async def _prompt(
        self, body: GenerateRequest, templated: bool, variables: Mapping[str, Any]
    ) -> Prompt:
        """Build the prompt. `context`: the token ids of an earlier response."""
        generation = self.context.generation
        text = body.prompt or ""
        if templated:
            before = [{"role": "system", "content": body.system}] if body.system else []
            content = with_images(text, body.images, "images")
            messages = [*before, {"role": "user", "content": content}]
            prompt = await generation.from_messages(messages, ChatOptions(variables=variables))
        else:
            (prompt,) = await generation.tokenize(text, whole=True)
        if not body.context:
            return prompt
        (whole,) = await generation.from_ids([*body.context, *prompt.ids])
        return evolve(whole, text=prompt.text)

    def _turn(self, body: AnyRequest, prompt: Prompt, constraint: Any, **options: Any) -> ChatTurn:
        info = self.context.engine.info
        turn = ChatTurn(
            generation=self.context.generation,
            prompt=prompt,
            params=params_of(body, info.defaults, info.max_model_len, constraint),
            reasoning=body.think is not False,
            tokens=bool(body.logprobs),
            fields={"structured_outputs": "format", "max_tokens": "num_predict"},
            **options,
        )
        turn.check()
        return turn

    def _empty_answer(self, body: AnyRequest, nothing: Mapping[str, Any]) -> Response:
        """Respond to an empty request, which only loads or unloads a model in Ollama."""
        unload = body.keep_alive in (0, "0")
        answer = {
            "model": body.model,
            "created_at": now(),
            **nothing,
            "done": True,
            "done_reason": "unload" if unload else "load",
        }
        return Response(line(answer), 200, media_type=_LINES if body.stream else "application/json")

    def failure(self, error: ApiError) -> Any:
        """See `RouteFamily.failure`."""
        return _failure(error)

    async def _respond(self, job: _Job) -> Response:
        started = await job.turn.start()
        if job.stream:
            return EventStream(self._lines(job, started), media=_LINES, failed=_failed)
        return json_response(await self._whole(job, started))

    async def _whole(self, job: _Job, started: RunningTurn) -> dict[str, Any]:
        output, (message,) = await started.messages()
        job.clock.token(None if output.metrics is None else output.metrics.first_token_time)
        parsed: ParsedMessage = message.parsed
        message_fields: dict[str, Any] = {"content": parsed.content or ""}
        if parsed.reasoning is not None:
            message_fields["thinking"] = parsed.reasoning
        if parsed.tool_calls and job.chat:
            message_fields["tool_calls"] = [call_of(c.name, c.arguments) for c in parsed.tool_calls]
        return {
            **job.piece(message_fields),
            **_logprobs(message.logprobs),
            **_end(job, output, message.finish_reason, message.generated, message.token_ids),
        }

    async def _lines(self, job: _Job, started: RunningTurn) -> AsyncGenerator[bytes, None]:
        pieces, ids = Pieces(), list[int]()
        async with aclosing(started.running) as outputs:
            async for output in outputs:
                job.clock.token()
                for new in started.deltas(output):
                    ids += new.token_ids
                    extra = _logprobs(new.logprobs)
                    for piece in pieces.convert(new.events):
                        yield line({**job.piece(piece), **extra})
                        extra = {}
                    if new.finish_reason is not None:
                        last = _end(job, output, new.finish_reason, new.generated, ids)
                        yield line({**job.piece({"content": ""}), **extra, **last})

    # Vectors.

    async def embed(self, request: Request) -> Response:
        """Compute one embedding per text."""
        body = await read(request, EmbedRequest, typed=False)
        await self._served(body.model)
        clock = Clock()
        vectors, tokens = await self._vectors(body.input, body.truncate, body.dimensions)
        figures = clock.figures(tokens, 0)
        answer: Embeddings = {
            "model": body.model,
            "embeddings": vectors,
            "total_duration": figures["total_duration"],
            "load_duration": 0,
            "prompt_eval_count": tokens,
        }
        return json_response(answer)

    async def embeddings(self, request: Request) -> Response:
        """Compute the embedding of one text, for older clients."""
        body = await read(request, EmbeddingsRequest, typed=False)
        await self._served(body.model)
        vectors, _ = await self._vectors(body.prompt, True, None)
        answer: Embedding = {"embedding": vectors[0]}
        return json_response(answer)

    async def _vectors(
        self, texts: str | Sequence[str], truncate: bool, dimensions: int | None
    ) -> tuple[list[list[float]], int]:
        """Get embeddings from the server's own route; returns (vectors, prompt tokens)."""
        if not texts:
            return [], 0
        request: dict[str, Any] = {"input": texts}
        if truncate:
            request["truncate_prompt_tokens"] = -1
        if dimensions is not None:
            request["dimensions"] = dimensions
        body = msgspec.json.encode(request)
        status, answer = await self.context.loopback.post("/v1/embeddings", body, current_owner())
        response = json.loads(answer)
        if status >= 300:
            error = response.get("error", {})
            raise ApiError(status, str(error.get("message", "error")), param=error.get("param"))
        return [one["embedding"] for one in response["data"]], response["usage"]["prompt_tokens"]


def _check_supported(body: GenerateRequest) -> None:
    """Raise ApiError(400) for unsupported fields."""
    if body.images and (body.raw or body.context):
        raise bad_field("images", "images cannot be combined with raw or context")
    if body.suffix:
        raise bad_field("suffix", "suffix is not supported by this model")
    if body.template:
        raise bad_field(
            "template", "template is not supported; the server uses the model's template"
        )


async def _status_lines(first: Status, steps: Steps) -> AsyncGenerator[bytes, None]:
    async with aclosing(steps):
        yield line(first)
        async for step in steps:
            yield line(step)


def _end(
    job: _Job, output: Any, reason: str | None, generated: int, ids: Sequence[int]
) -> dict[str, Any]:
    """The fields of the last line: the finish reason and the statistics."""
    prompt = list(output.prompt_token_ids)
    context = {} if job.chat else {"context": [*prompt, *ids]}
    figures = job.clock.figures(len(prompt), generated)
    return {"done": True, "done_reason": reason_of(reason), **context, **figures}


def _logprobs(positions: Any) -> dict[str, Any]:
    return {} if positions is None else {"logprobs": logprobs_of(positions)}


def _failure(error: ApiError) -> Failure:
    return {"error": error_body(error)["error"]["message"]}


def _failed(error: ApiError) -> bytes:
    return line(_failure(error))
