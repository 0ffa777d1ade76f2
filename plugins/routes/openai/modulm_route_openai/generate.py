"""`/inference/v1/generate`: token ids in and out, in vLLM's form."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
from attrs import frozen
from msgspec import UNSET, Meta, Struct, UnsetType, structs
from starlette.responses import Response

from modulm_expert_routes import chosen_experts, encode_routes
from modulm_route_openai.answers import (
    StreamUsage,
    answer_id,
    prompt_logprobs,
    usage,
    version_ranges,
)
from modulm_route_openai.objects import PromptLogprob, Usage, WeightVersion
from modulm_server.auth import owner_of
from modulm_server.constraints import requested_constraints, single_constraint
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field, json_response, to_struct
from modulm_server.logprobs import MIN_LOGPROB
from modulm_server.running_requests import running_requests
from modulm_server.sampling import (
    Priority,
    Salt,
    SamplingFields,
    check_priority,
    sampling_params,
    shortened,
)
from modulm_server.sse import DONE, EventStream, frame
from modulm_server.transfer import Transferred, transferred

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from starlette.requests import Request

    from modulm.contracts.sampling import SamplingParams
    from modulm_server.generation import Running
    from modulm_server.route import RouteContext

__all__ = ["AbortRequest", "Generate", "GenerateAnswer", "GenerateRequest", "abort_requests"]

#: vLLM's default of `max_tokens`.
_MAX_TOKENS = 16


class _Sampling(SamplingFields, kw_only=True):
    """`sampling_params`, as the render routes write them."""

    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    detokenize: bool | None = None
    extra_args: dict[str, Any] | None = None
    output_kind: Any = None


class GenerateRequest(Struct, kw_only=True):
    """`POST /inference/v1/generate`.

    content_parts: the media of the prompt (`image_url` and so on), in the order of their
    placeholders, which token_ids has once for each.
    """

    token_ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(min_length=1)]
    sampling_params: dict[str, Any] = {}
    model: str | UnsetType = UNSET
    request_id: Annotated[str, Meta(max_length=512)] | None = None
    prompt: str | None = None
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    output_mode: str = "tokens"


class AbortRequest(Struct, kw_only=True):
    """`POST /inference/v1/abort_requests`. request_ids: X-Request-Ids, or ids of responses."""

    request_ids: Annotated[list[str], Meta(max_length=4096)]


async def abort_requests(request: Request, body: AbortRequest) -> Response:
    """End requests of the same API key, which answer with what they have, and finish_reason
    abort. Unknown ids are ignored.
    """
    await running_requests(request.scope).abort(body.request_ids, owner_of(request))
    return Response(status_code=200)


class TokenLogprob(TypedDict):
    """A token with its log probability."""

    token_id: int
    logprob: float
    rank: int | None


class SampledToken(TokenLogprob):
    """The token of a position, and the best ones."""

    top_logprobs: list[TokenLogprob]


class TokenLogprobs(TypedDict):
    """Log probabilities of a choice."""

    content: list[SampledToken]


class Choice(TypedDict):
    """An answer in tokens. text: with `output_mode: text`. routed_experts: a .npy file in base64,
    of a finished answer, with --enable-return-routed-experts.
    """

    index: int
    token_ids: list[int]
    text: NotRequired[str]
    logprobs: TokenLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: NotRequired[list[WeightVersion]]
    sampling_mask: NotRequired[list[list[int]]]
    routed_experts: NotRequired[str]


class GenerateAnswer(Transferred):
    """The answer of `POST /inference/v1/generate`, or a chunk of its stream."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[Choice]
    usage: NotRequired[Usage]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]


@frozen
class _Job:
    head: GenerateAnswer
    body: GenerateRequest
    sampling: _Sampling
    params: SamplingParams
    running: Running


class Generate:
    """Answers requests in tokens."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._generation = context.generation

    async def answer(self, request: Request, body: GenerateRequest) -> Response:
        """Answer a request, streamed or whole."""
        job = await self._start(request, body)
        if body.stream:
            quiet = self._context.config.group(ServerConfig).sse_keep_alive_interval
            return EventStream(self._frames(job), quiet=quiet)
        output = await job.running.last()
        generated = sum(len(choice.token_ids) for choice in output.outputs)
        answer: GenerateAnswer = {
            **job.head,
            "choices": [_choice(job, choice, chosen_experts(choice)) for choice in output.outputs],
            "usage": usage(len(output.prompt_token_ids), generated, output.num_cached_tokens),
        }
        if body.return_token_ids:
            answer["prompt_token_ids"] = list(output.prompt_token_ids)
        if job.sampling.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return json_response({**answer, **transferred(output)})

    async def _start(self, request: Request, body: GenerateRequest) -> _Job:
        generation = self._generation
        model = await generation.find_model(body.model)
        generation.check_open()
        if body.features:
            raise bad_field(
                "features",
                "Not supported yet: features. Send media as content_parts.",
                "unsupported",
            )
        if body.output_mode not in ("tokens", "text"):
            raise bad_field(
                "output_mode",
                "output_mode must be tokens or text; /v1/chat/completions/derender parses tokens",
            )
        sampling = self._sampling(body)
        constraint = single_constraint(**requested_constraints(sampling))
        params: Any = sampling_params(
            sampling,
            defaults={},
            max_tokens=_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
            logprobs=sampling.logprobs,
            constraint=None if constraint is None else constraint[1],
        )
        head: GenerateAnswer = {
            "request_id": answer_id("generate", request, body.request_id),
            "model": model.name,
            "created": int(time.time()),
            "output_mode": "text" if body.output_mode == "text" else "tokens",
            "choices": [],
        }
        if body.content_parts:
            media = await generation.media.read_parts(body.content_parts, "content_parts")
            (prompt,) = await generation.with_media([(body.token_ids, media.sources)], media)
        else:
            (prompt,) = await generation.from_ids(body.token_ids)
        running = await generation.generate(
            shortened(prompt, sampling),
            params,
            priority=check_priority(self._context.config, body.priority),
            cache_salt=body.cache_salt,
            adapter=model.adapter,
            fields={"prompt": "token_ids"},
        )
        return _Job(head, body, sampling, params, running)

    def _sampling(self, body: GenerateRequest) -> _Sampling:
        """Read `sampling_params`. Raises ApiError(400)."""
        sampling = to_struct(body.sampling_params, _Sampling)
        if sampling.use_beam_search:
            raise bad_field("sampling_params", "use_beam_search: use /v1/completions")
        options: Any = body.stream_options
        more: dict[str, Any] = {"stream": body.stream}
        if options is not None:
            more["stream_options"] = to_struct(
                {"stream_options": options}, _Sampling
            ).stream_options
        if body.kv_transfer_params is not None:
            more["kv_transfer_params"] = body.kv_transfer_params
        if sampling.extra_args:
            more["vllm_xargs"] = {**sampling.extra_args, **(sampling.vllm_xargs or {})}
        return structs.replace(sampling, **more)

    async def _frames(self, job: _Job) -> AsyncGenerator[bytes, None]:
        counted = StreamUsage(job.sampling, self._context.config)
        generated = [0] * job.params.n
        routes: list[list[np.ndarray]] = [[] for _ in generated]
        first = bool(job.body.return_token_ids)
        async with aclosing(job.running) as outputs:
            async for output in outputs:
                counted.prompt(0, len(output.prompt_token_ids), output.num_cached_tokens)
                for choice in output.outputs:
                    generated[choice.index] += len(choice.token_ids)
                    counted.generated(choice.index, generated[choice.index])
                    experts = chosen_experts(choice)
                    if experts is not None:
                        routes[choice.index].append(experts)
                    ended = routes[choice.index] if choice.finished() else []
                    made = _choice(job, choice, np.concatenate(ended) if ended else None)
                    chunk: GenerateAnswer = {**job.head, "choices": [made]}
                    if first:
                        first = False
                        chunk["prompt_token_ids"] = list(output.prompt_token_ids)
                    if counted.each:
                        chunk["usage"] = counted.now(choice.index)
                    yield frame(chunk)
        if counted.last:
            end: GenerateAnswer = {**job.head, "usage": counted.total()}
            yield frame(end)
        yield DONE


def _choice(job: _Job, choice: Any, routes: np.ndarray | None) -> Choice:
    made: Choice = {
        "index": choice.index,
        "token_ids": list(choice.token_ids),
        "logprobs": _logprobs(
            choice.logprobs,
            choice.token_ids,
            with_others=bool(job.params.logprobs or job.params.logprob_token_ids),
        ),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.weight_versions:
        made["weight_versions"] = version_ranges(choice.weight_versions)
    if choice.sampling_mask is not None:
        made["sampling_mask"] = choice.sampling_mask
    if routes is not None:
        made["routed_experts"] = encode_routes(routes)
    if job.head["output_mode"] == "text":
        made["text"] = choice.text
    return made


def _logprobs(
    positions: Sequence[Mapping[int, Any]] | None, ids: Sequence[int], *, with_others: bool
) -> TokenLogprobs | None:
    if positions is None:
        return None

    def one(token: int, entry: Any) -> TokenLogprob:
        logprob = max(entry.logprob, MIN_LOGPROB)
        return {"token_id": token, "logprob": logprob, "rank": entry.rank}

    content: list[SampledToken] = []
    for token, position in zip(ids, positions, strict=True):
        best = [one(*pair) for pair in position.items()] if with_others else []
        content.append({**one(token, position[token]), "top_logprobs": best})
    return {"content": content}
