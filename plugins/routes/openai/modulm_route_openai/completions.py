"""`/v1/completions`: one or several prompts in any form."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm_expert_routes import chosen_experts, encode_routes
from modulm_frontend.beam_search import BeamSearchParams
from modulm_route_openai.answers import (
    StreamUsage,
    answer_id,
    cached_tokens,
    completion_logprobs,
    draft_metrics,
    fingerprint,
    paced,
    prompt_logprobs,
    usage,
    version_ranges,
)
from modulm_server.constraints import requested_constraints, single_constraint
from modulm_server.flags import ServerConfig
from modulm_server.generation import Running, abandon, merged
from modulm_server.json_body import bad_field, convert, json_response
from modulm_server.prompt_embeds import refuse_embeds
from modulm_server.prompts import Prompt
from modulm_server.rendering import rendered, token_offsets
from modulm_server.request_cost import check_cost
from modulm_server.sampling import LIMITS, check_priority, sampling_params, shortened
from modulm_server.sse import DONE, EventStream, frame
from modulm_server.transfer import transferred

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from modulm.contracts.outputs import RequestOutput
    from modulm.contracts.sampling import SamplingParams, StructuredOutputs
    from modulm_route_openai.objects import (
        Completion,
        CompletionChoice,
        CompletionChunk,
        CompletionLogprobs,
    )
    from modulm_route_openai.schema import CompletionRequest
    from modulm_server.route import RouteContext
    from modulm_server.transfer import Transferred

__all__ = ["Completions"]

#: Prompts to submit per turn of the event loop.
_TOGETHER = 16
#: OpenAI's default for completions, where no end of turn limits the output.
_MAX_TOKENS = 16
#: Maximum tensors of one request.
_MOST_EMBEDS = 128


@frozen
class _Job:
    """A validated request with its tokenized prompts.

    nothing: no token is requested, only the prompt's echo. fields: the API's names of engine
    fields.
    """

    id: str
    created: int
    model: str
    body: CompletionRequest
    prompts: tuple[Prompt, ...]
    params: SamplingParams | BeamSearchParams
    nothing: bool
    fields: Mapping[str, str]
    adapter: str | None = None

    @property
    def n(self) -> int:
        return self.params.n


class Completions:
    """Answers completion requests."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._generation = context.generation

    async def answer(self, request: Request, body: CompletionRequest) -> Response:
        """Answer a request, streamed or whole."""
        self._generation.check_stream(body.stream)
        job = await self._job(request, body)
        runs = await self._start(job)
        if body.stream:
            quiet = self._context.config.group(ServerConfig).sse_keep_alive_interval
            return EventStream(self._frames(job, runs), quiet=quiet)
        return json_response(await self._whole(job, runs))

    async def rendered(self, request: Request, body: CompletionRequest) -> Response:
        """Render the request as engine requests, one per prompt."""
        job = await self._job(request, body)
        tokenizer = self._generation.tokenizer
        requests = [
            rendered(
                f"{job.id}-{n}",
                job.model,
                prompt,
                job.params,
                tokenizer,
                stream=body.stream,
                cache_salt=body.cache_salt,
                priority=body.priority,
            )
            for n, prompt in enumerate(job.prompts)
        ]
        if body.return_token_offsets:
            run = self._generation.work.run
            for one, prompt in zip(requests, job.prompts, strict=True):
                size = len(prompt.text or "")
                one["token_offsets"] = await run(size, token_offsets, prompt, tokenizer)
        return json_response(requests)

    async def _job(self, request: Request, body: CompletionRequest) -> _Job:
        model = await self._generation.find_model(body.model)
        self._generation.check_open()
        if body.suffix:
            raise bad_field("suffix", "suffix is not supported by this model")
        if body.prompt_embeds is not None:
            self._check_embeds(body)
        nothing = body.max_tokens == 0
        if nothing and not body.echo:
            raise bad_field("max_tokens", "max_tokens must be at least 1, or 0 with echo: true")
        constraint = single_constraint(**requested_constraints(body))
        params = self._params(body, nothing, None if constraint is None else constraint[1])
        if body.prompt_embeds is not None:
            prompts = await self._embeds(body.prompt_embeds)
        else:
            prompts = await self._prompts(request, body)
        server = self._context.config.group(ServerConfig)
        check_cost(params, [len(one.ids) for one in prompts], self._context.engine.info, server)
        return _Job(
            id=answer_id("cmpl", request, body.request_id),
            created=int(time.time()),
            model=model.name,
            adapter=model.adapter,
            body=body,
            prompts=prompts,
            params=params,
            nothing=nothing,
            fields={} if constraint is None else {"structured_outputs": constraint[0]},
        )

    def _params(
        self, body: CompletionRequest, nothing: bool, constraint: StructuredOutputs | None
    ) -> SamplingParams | BeamSearchParams:
        defaults = self._context.engine.info.defaults
        limit = defaults.get("max_tokens", _MAX_TOKENS)
        params = sampling_params(
            body,
            defaults=defaults,
            max_tokens=1 if nothing else limit if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            constraint=constraint,
        )
        if isinstance(params, BeamSearchParams):
            if body.echo and body.logprobs is not None:
                raise bad_field("echo", "echo with logprobs is not supported with use_beam_search")
            return params
        if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
            params = params.with_(prompt_logprobs=body.logprobs)
        return params

    async def _prompts(self, request: Request, body: CompletionRequest) -> tuple[Prompt, ...]:
        many = await convert(request, _several, body.prompt)
        if not 0 < len(many) <= LIMITS.prompts:
            raise bad_field("prompt", f"prompt must have 1 to {LIMITS.prompts} prompts")
        if len({isinstance(item, str) for item in many}) > 1:
            raise bad_field("prompt", "prompt must be either texts or lists of token ids, not both")
        if not isinstance(many[0], str):
            prompts = await self._generation.from_ids(*many)
        else:
            prompts = await self._generation.tokenize(
                *many,
                add_special_tokens=body.add_special_tokens is not False,
                whole=body.truncate_prompt_tokens is None,
            )
        return tuple(shortened(prompt, body) for prompt in prompts)

    def _check_embeds(self, body: CompletionRequest) -> None:
        refuse_embeds(self._context.engine.info, "prompt_embeds")
        if body.prompt:
            raise bad_field("prompt", "prompt cannot be combined with prompt_embeds")
        if body.echo:
            raise bad_field("echo", "echo is not supported for prompt_embeds")

    async def _embeds(self, value: Any) -> tuple[Prompt, ...]:
        """Read one or several tensors, one after the other to limit memory."""
        many = value if isinstance(value, list) else [value]
        if not 0 < len(many) <= _MOST_EMBEDS:
            raise bad_field("prompt_embeds", f"prompt_embeds must have 1 to {_MOST_EMBEDS} tensors")
        return tuple([await self._generation.embeds(one) for one in many])

    async def _start(self, job: _Job) -> list[Running]:
        """Submit all prompts to the engine, or none."""
        priority = check_priority(self._context.config, job.body.priority)
        tasks: list[asyncio.Task[Running]] = []
        try:
            for prompt in job.prompts:
                start = self._generation.generate(
                    prompt,
                    job.params,
                    priority=priority,
                    cache_salt=job.body.cache_salt,
                    adapter=job.adapter,
                    fields=job.fields,
                )
                tasks.append(asyncio.ensure_future(start))
                if len(tasks) % _TOGETHER == 0:
                    await asyncio.sleep(0)  # keeps the event loop responsive
            await asyncio.wait(tasks)
            return [task.result() for task in tasks]
        except BaseException:
            abandon(tasks)
            raise

    async def _whole(self, job: _Job, runs: Sequence[Running]) -> Completion:
        async with AsyncExitStack() as stack:
            for run in runs:
                stack.push_async_callback(run.aclose)
            outputs = await self._generation.last_outputs(runs)
        indexed_choices = [
            (output, choice, prompt_index * job.n + choice.index)
            for prompt_index, output in enumerate(outputs)
            for choice in output.outputs
        ]
        choices = [
            formatted
            async for formatted in paced(
                indexed_choices, lambda arguments: self._choice(job, *arguments)
            )
        ]
        generated = (
            0 if job.nothing else sum(len(choice.token_ids) for _, choice, _ in indexed_choices)
        )
        cached = cached_tokens(job.body, self._context.config, *outputs)
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        single = outputs[0] if len(indexed_choices) == 1 else None
        return {
            **self._head(job),
            "choices": choices,
            "usage": usage(tokens, generated, cached),
            **draft_metrics(job.body, self._context.config, single, generated),
            **transferred(outputs[0]),
        }

    def _head(self, job: _Job) -> CompletionChunk:
        return {
            "id": job.id,
            "object": "text_completion",
            "created": job.created,
            "model": job.model,
            "system_fingerprint": fingerprint(self._context.config, self._context.engine),
            "choices": [],
        }

    def _choice(self, job: _Job, output: Any, choice: Any, index: int) -> CompletionChoice:
        text, ids, positions = choice.text, list(choice.token_ids), choice.logprobs
        if job.nothing:
            text, ids, positions = "", [], None if positions is None else []
        if job.body.echo:
            text = self._prompt_text(output) + text
            if positions is not None and output.prompt_logprobs is not None:
                positions = [*output.prompt_logprobs, *positions]
                ids = [*output.prompt_token_ids, *ids]
        choice_object: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(job, positions, ids, 0),
            "finish_reason": "length" if job.nothing else choice.finish_reason,
            "stop_reason": None if job.nothing else choice.stop_reason,
        }
        if job.body.prompt_logprobs is not None:
            choice_object["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if job.body.return_token_ids:
            choice_object["prompt_token_ids"] = list(output.prompt_token_ids)
            choice_object["token_ids"] = [] if job.nothing else list(choice.token_ids)
        if job.body.return_weight_versions:
            choice_object["weight_versions"] = version_ranges(choice.weight_versions)
        experts = chosen_experts(choice)
        if experts is not None and not job.nothing:
            choice_object["routed_experts"] = encode_routes(experts)
        return choice_object

    def _logprobs(
        self, job: _Job, positions: Any, ids: Sequence[int], offset: int
    ) -> CompletionLogprobs | None:
        if positions is None:
            return None
        as_ids = job.body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self._context.config.group(ServerConfig).return_tokens_as_token_ids
        return completion_logprobs(
            positions, ids, job.params.logprobs or 0, as_ids, offset, self._token_text
        )

    def _token_text(self, token: int) -> str:
        return str(self._generation.tokenizer.decode([token], False))

    def _prompt_text(self, output: Any) -> str:
        if output.prompt is not None:
            return str(output.prompt)
        return str(self._generation.tokenizer.decode(output.prompt_token_ids, False))

    async def _frames(self, job: _Job, runs: Sequence[Running]) -> AsyncGenerator[bytes, None]:
        counted = StreamUsage(job.body, self._context.config)
        head = self._head(job)
        offsets: dict[int, int] = {}
        totals: dict[int, int] = {}
        last: RequestOutput | None = None

        def chunks(prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
            counted.prompt(prompt_index, len(output.prompt_token_ids), output.num_cached_tokens)
            there: Transferred = {} if prompt_index * job.n in totals else transferred(output)
            for choice in output.outputs:
                index = prompt_index * job.n + choice.index
                chunk = self._piece(job, output, choice, index, index not in totals, offsets)
                totals[index] = totals.get(index, 0) + len(choice.token_ids)
                counted.generated(index, 0 if job.nothing else totals[index])
                body: CompletionChunk = {**head, "choices": [chunk], **there}
                there = {}
                if counted.each:
                    body["usage"] = counted.now(index, prompt_index)
                yield frame(body)

        async with AsyncExitStack() as stack:
            for run in runs:
                stack.push_async_callback(run.aclose)
            if len(runs) == 1:
                async for output in runs[0]:
                    last = output if job.n == 1 else None
                    for data in chunks(0, output):
                        yield data
            else:
                async for prompt_index, output in merged(runs):
                    for data in chunks(prompt_index, output):
                        yield data
        if counted.last:
            total = counted.total()
            made = total["completion_tokens"]
            metrics = draft_metrics(job.body, self._context.config, last, made)
            yield frame({**head, "usage": total, **metrics})
        yield DONE

    def _piece(
        self, job: _Job, output: Any, choice: Any, index: int, first: bool, offsets: dict[int, int]
    ) -> CompletionChoice:
        """Build a chunk's choice. The first one includes the echo.

        offsets: characters of the tokens so far, by choice; only with log probabilities.
        """
        text, ids, positions = choice.text, list(choice.token_ids), choice.logprobs
        if job.nothing:
            text, ids, positions = "", [], None if positions is None else []
        if first and job.body.echo:
            text = self._prompt_text(output) + text
            if positions is not None and output.prompt_logprobs is not None:
                positions = [*output.prompt_logprobs, *positions]
                ids = [*output.prompt_token_ids, *ids]
        logprobs = self._logprobs(job, positions, ids, offsets.get(index, 0))
        if logprobs is not None and logprobs["tokens"]:
            offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        choice_object: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if job.nothing else choice.finish_reason,
            "stop_reason": None if job.nothing else choice.stop_reason,
        }
        if job.body.return_weight_versions and choice.weight_versions:
            choice_object["weight_versions"] = version_ranges(choice.weight_versions)
        if job.body.return_token_ids:
            choice_object["token_ids"] = [] if job.nothing else list(choice.token_ids)
            if first:
                choice_object["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice_object


def _several(value: Any) -> list[Any]:
    """The prompts of a request: texts or lists of token ids. Raises ApiError(400)."""
    many = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not all(isinstance(item, str) or _is_ids(item) for item in many[: LIMITS.prompts]):
        raise bad_field(
            "prompt", "prompt must be a string, a list of token ids, or a list of either"
        )
    return many


def _is_ids(value: Any) -> bool:
    """Whether a value is one prompt of token ids. The ids are validated later."""
    return isinstance(value, list) and set(map(type, value)) == {int}
