"""Cohere's embedding API (https://docs.cohere.com/reference/embed)."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from modulm_route_pooling.objects import CohereEmbeddings
from modulm_route_pooling.prompts import text_of
from modulm_route_pooling.schema import CohereEmbedRequest, EmbedRequest
from modulm_route_pooling.vectors import bits
from modulm_server.json_body import bad_field

__all__ = ["answer", "question", "refuse_images"]

_ENCODINGS: dict[str, Callable[[np.ndarray], Any]] = {
    "float": lambda vector: vector.tolist(),
    "base64": lambda vector: base64.b64encode(vector.astype("<f4").tobytes()).decode(),
    "binary": lambda vector: bits(vector, signed=True),
    "ubinary": lambda vector: bits(vector, signed=False),
}


def refuse_images(body: CohereEmbedRequest) -> None:
    """Raise ApiError(400) for images, which are not supported yet."""
    if body.images:
        raise bad_field("images", "Not supported yet: images")


#: Cohere's task names, and the names of their prompts in checkpoints.
_TASKS: dict[str, tuple[str, ...]] = {
    "search_query": ("query", "retrieval.query"),
    "search_document": ("document", "passage", "retrieval.passage"),
    "classification": ("Classification",),
    "clustering": ("Clustering", "separation"),
}


def prompt_of(body: CohereEmbedRequest, prompts: Collection[str]) -> str | None:
    """The name of the checkpoint's prompt for the request's `input_type`, or None.

    Clients always send an `input_type`; for a checkpoint without prompts it has no effect. Raises
    ApiError(400) for an unknown one, or one without a prompt in a checkpoint that has prompts.
    """
    kind = body.input_type
    if kind is None or kind in prompts:
        return kind
    prompt_name = next((name for name in _TASKS.get(kind, ()) if name in prompts), None)
    if prompt_name is None and (prompts or kind not in _TASKS):
        known = ", ".join(prompts or _TASKS)
        raise bad_field("input_type", f"input_type: {kind!r:.60} is not one of {known}")
    return prompt_name


def question(body: CohereEmbedRequest, max_tokens: int, prompts: Collection[str]) -> EmbedRequest:
    """Convert to OpenAI's request. max_tokens: the model's limit. prompts: the names of the
    checkpoint's prompts. Raises ApiError(400).
    """
    if (body.texts is None) == (body.inputs is None):
        raise bad_field("texts", "send exactly one of texts and inputs")
    texts = body.texts if body.texts is not None else body.inputs
    limit = None if body.truncate == "NONE" else min(body.max_tokens or max_tokens, max_tokens)
    return EmbedRequest(
        input=[text_of("inputs", one) for one in texts or []],
        dimensions=body.output_dimension,
        truncate_prompt_tokens=limit,
        truncation_side="left" if body.truncate == "START" else "right",
        prompt_name=prompt_of(body, prompts),
        priority=body.priority,
    )


def answer(
    body: CohereEmbedRequest, texts: Sequence[str], vectors: Sequence[np.ndarray], tokens: int
) -> CohereEmbeddings:
    """Build the response with all requested embedding types."""
    wanted = body.embedding_types or ["float"]
    embeddings = {kind: [_ENCODINGS[kind](vector) for vector in vectors] for kind in wanted}
    return {
        "id": f"embd-{uuid.uuid4().hex}",
        "response_type": "embeddings_by_type",
        "embeddings": embeddings,
        "texts": list(texts),
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
    }
