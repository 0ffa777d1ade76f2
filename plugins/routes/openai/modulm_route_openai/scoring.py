"""`/generative_scoring`: probabilities of labels as the next token, from a generative model."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType

from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm_route_openai.answers import answer_id, usage
from modulm_route_openai.objects import Usage
from modulm_server.errors import ApiError
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field, json_response
from modulm_server.prompts import Prompt
from modulm_server.sampling import LIMITS, check_priority

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from modulm_server.generation import ServedModel
    from modulm_server.route import RouteContext

__all__ = ["ScoringAnswer", "ScoringRequest", "score"]

Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = str | list[Id]


class ScoringRequest(Struct, kw_only=True):
    """`POST /generative_scoring`: the score of an item is the probability of the first label.

    query, items: texts or token ids. apply_softmax: probabilities among the labels only.
    item_first: the item comes before the query.
    """

    query: Text
    items: Annotated[list[Text], Meta(min_length=1)]
    label_token_ids: Annotated[list[Id], Meta(min_length=1)]
    model: str | UnsetType = UNSET
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    priority: int | None = None
    request_id: Annotated[str, Meta(max_length=LIMITS.name)] | None = None
    cache_salt: str | None = None


class ItemScore(TypedDict):
    """The score of one item."""

    index: int
    object: Literal["score"]
    score: float


class ScoringAnswer(TypedDict):
    """The scores of all items, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage


async def score(context: RouteContext, request: Request, body: ScoringRequest) -> Response:
    """Answer a request. Raises ApiError(400), also if log probabilities are not the model's."""
    mode = context.config.model.logprobs_mode
    if mode != "raw_logprobs":
        raise ApiError(400, f"scores need --logprobs-mode raw_logprobs; the server has {mode}")
    vocabulary = context.engine.info.vocabulary
    if max(body.label_token_ids) >= vocabulary:
        raise bad_field("label_token_ids", f"label_token_ids: ids must be below {vocabulary}")
    sequences = len(body.items) * len(body.label_token_ids)
    most = context.config.group(ServerConfig).max_request_sequences
    if sequences > most:
        raise bad_field(
            "items",
            f"items: {len(body.items)} items with {len(body.label_token_ids)} labels are "
            f"{sequences} sequences; the limit is {most} (--max-request-sequences)",
        )
    model = await context.generation.find_model(body.model)
    prompts = await _prompts(context, body)
    tasks = [
        asyncio.ensure_future(_logprob(context, body, model, prompt, label))
        for prompt in prompts
        for label in body.label_token_ids
    ]
    try:
        logprobs = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    labels = len(body.label_token_ids)
    rows = [logprobs[first : first + labels] for first in range(0, len(logprobs), labels)]
    answer: ScoringAnswer = {
        "id": answer_id("generative-scoring", request, body.request_id),
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": [
            {"index": index, "object": "score", "score": _score(row, body.apply_softmax)}
            for index, row in enumerate(rows)
        ],
        "usage": usage(sum(len(prompt.ids) for prompt in prompts), len(prompts), None),
    }
    return json_response(answer)


async def _prompts(context: RouteContext, body: ScoringRequest) -> list[Prompt]:
    """Join the query with each item."""
    tokenize = partial(_ids, context)
    query = await tokenize(body.query, special=body.add_special_tokens)
    prompts = []
    for item in body.items:
        ids = await tokenize(item, special=False)
        prompts.append(Prompt([*ids, *query] if body.item_first else [*query, *ids]))
    return prompts


async def _ids(context: RouteContext, text: Text, *, special: bool) -> Sequence[int]:
    if not isinstance(text, str):
        return text
    (prompt,) = await context.generation.tokenize(text, add_special_tokens=special)
    return prompt.ids


async def _logprob(
    context: RouteContext, body: ScoringRequest, model: ServedModel, prompt: Prompt, label: int
) -> float:
    """Return the log probability of a label: that of a token, which the label is forced to be.

    Requests of one prompt share its KV cache.
    """
    params = SamplingParams(
        max_tokens=1, temperature=0, logprobs=0, allowed_token_ids=[label], ignore_eos=True,
        output_kind=OutputKind.FINAL_ONLY,
    )  # fmt: skip
    running = await context.generation.generate(
        prompt,
        params,
        priority=check_priority(context.config, body.priority),
        cache_salt=body.cache_salt,
        adapter=model.adapter,
        fields={"prompt": "query"},
    )
    output: Any = (await running.last()).outputs[0]
    return float(output.logprobs[0][label].logprob)


def _score(logprobs: Sequence[float], softmax: bool) -> float:
    """Return the probability of the first label, among all labels or the whole vocabulary."""
    if not softmax:
        return math.exp(logprobs[0])
    largest = max(logprobs)
    shares = [math.exp(logprob - largest) for logprob in logprobs]
    return shares[0] / sum(shares)
