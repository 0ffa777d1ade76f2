"""Builds the prompts of a request: one per input, or pairs of texts to compare."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from modulm.contracts.pooler import PairContent, PoolingInputs, paired
from modulm.contracts.requests import PromptLike
from modulm.contracts.sampling import PoolingParams
from modulm.errors import RequestError
from modulm_media.messages import part_kind
from modulm_route_pooling.objects import Document
from modulm_route_pooling.schema import ClassifyRequest, EmbedRequest, RerankRequest, ScoreRequest
from modulm_server.generation import GenerationService
from modulm_server.json_body import bad_field
from modulm_server.media_service import RequestMedia
from modulm_server.prompts import ChatOptions, Prompt
from modulm_server.sampling import LIMITS

__all__ = ["Part", "Side", "pairs_of", "prompts_of", "shown_document", "size", "text_of"]

#: The limit on the text of all pairs, in multiples of the longest text.
_PAIRED = 8

Side: TypeAlias = "str | PairContent"
Part: TypeAlias = "tuple[Prompt | PromptLike, PoolingParams]"

#: The fields in which clients send the two sides of pairs.
_SIDES = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


async def prompts_of(
    generation: GenerationService,
    texts: PoolingInputs,
    body: EmbedRequest | ClassifyRequest,
    params: PoolingParams,
) -> list[Part]:
    """Tokenize every input. Raises ApiError(400) naming the field."""
    if body.messages is not None:
        options = ChatOptions(
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens is True,
            template=body.chat_template,
            variables=body.chat_template_kwargs or {},
            media_io_kwargs=body.media_io_kwargs,
            mm_processor_kwargs=body.mm_processor_kwargs,
        )
        return [(await generation.from_messages(body.messages, options), params)]
    if body.chat_template is not None:
        raise bad_field("chat_template", "chat_template needs messages; input has no template")
    many = await generation.work.run(_amount(body.input), _several, body.input)
    if not 0 < len(many) <= LIMITS.prompts:
        raise bad_field("input", f"input must have 1 to {LIMITS.prompts} texts")
    if len({isinstance(one, str) for one in many}) > 1:
        raise bad_field("input", "input must be either texts or lists of token ids, not both")
    special = body.add_special_tokens is not False

    def read() -> list[Part]:
        return [
            texts.read(one, params, special) if isinstance(one, str) else (array("q", one), params)
            for one in many
        ]

    for one in many:
        if isinstance(one, str):
            generation.work.check(len(one), "input")
    parts: list[Part] = await generation.work.run(sum(map(len, many)), read)
    return parts


async def pairs_of(
    generation: GenerationService, texts: PoolingInputs, body: ScoreRequest | RerankRequest
) -> tuple[Sequence[Side], Sequence[Side], RequestMedia]:
    """Read both sides of pairs and their media. Raises ApiError(400), RequestError."""
    if isinstance(body, RerankRequest):
        names, first, second = ("query", "documents"), body.query, body.documents
    else:
        names, first, second = _sides(body)
    for name, value in zip(names, (first, second), strict=True):
        if isinstance(value, list) and not 0 < len(value) <= LIMITS.prompts:
            raise bad_field(name, f"{name} must have 1 to {LIMITS.prompts} texts")
    ways = body.media_io_kwargs, body.mm_processor_kwargs
    sides, media = await generation.media.read_pairs(
        dict(zip(names, (first, second), strict=True)), *ways
    )
    left, right = sides
    for name, side in zip(names, sides, strict=True):
        for content in side:
            generation.work.check(size(content), name)

    def shorten() -> tuple[list[Side], list[Side]]:
        return (
            [_short(texts, one, body, "max_tokens_per_query") for one in left],
            [_short(texts, one, body, "max_tokens_per_doc") for one in right],
        )

    left, right = await generation.work.run(sum(map(size, [*left, *right])), shorten)
    try:
        pairs = paired(left, right, names[1])
    except RequestError as error:
        raise bad_field(names[1], error.message) from error
    total = sum(size(one) + size(other) for one, other in zip(*pairs, strict=True))
    if total > _PAIRED * generation.work.max_characters:
        raise bad_field(
            names[1], f"{names[1]}: all pairs together have too many characters ({total})"
        )
    return (*pairs, media)


def _sides(body: ScoreRequest) -> tuple[tuple[str, str], Any, Any]:
    for first, second in _SIDES:
        one, other = getattr(body, first), getattr(body, second)
        if one is not None and other is not None:
            return (first, second), one, other
    sent = [name for names in _SIDES for name in names if getattr(body, name) is not None]
    missing = {other: one for one, other in _SIDES} | dict(_SIDES)
    name = missing[sent[0]] if sent else "text_1"
    raise bad_field(name, f"{name} must be text or a list of texts")


def text_of(name: str, value: Any) -> str:
    """Read a text, {"text": ...}, or {"content": [{"type": "text", ...}]}."""
    if isinstance(value, Mapping):
        parts = value.get("content", value.get("text"))
        if isinstance(parts, list):
            parts = "\n".join(text_of(name, part) for part in parts)
        value = parts
    if not isinstance(value, str):
        raise bad_field(name, f"{name} must be text, or an object with text or content")
    return value


def size(side: Side) -> int:
    """The number of characters of one side."""
    return len(side.text if isinstance(side, PairContent) else side)


def _short(
    texts: PoolingInputs, text: Side, body: ScoreRequest | RerankRequest, field: str
) -> Side:
    """Truncate a text to the number of tokens in a request field; 0 means no limit."""
    most: int = getattr(body, field)
    if not most:
        return text
    if isinstance(text, PairContent):
        raise bad_field(field, f"{field}: texts with media cannot be truncated")
    ids = texts.tokenizer.encode(text, add_special_tokens=False)
    return text if len(ids) <= most else texts.tokenizer.decode(ids[:most])


def shown_document(document: Any, whole: bool) -> Document:
    """A document for the response: its text and, if `whole`, its media."""
    content = document.get("content") if isinstance(document, Mapping) else None
    if not isinstance(content, list) or not any(map(part_kind, content)):
        return {"text": text_of("documents", document)}
    texts = [text_of("documents", part) for part in content if part_kind(part) is None]
    text = "\n".join(texts)
    return {"text": text, "multi_modal": content} if whole else {"text": text}


def _amount(value: Any) -> int:
    """The characters or token ids of an input of any form."""
    if not isinstance(value, list):
        return len(value) if isinstance(value, str) else 0
    some = value[: LIMITS.prompts]
    return len(value) + sum(len(one) for one in some if isinstance(one, list | str))


def _several(value: Any) -> list[Any]:
    """The inputs of a request: texts or lists of token ids. Raises ApiError(400)."""
    many = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not all(isinstance(one, str) or _is_ids(one) for one in many[: LIMITS.prompts]):
        raise bad_field("input", "input must be text, a list of token ids, or a list of either")
    return many


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}
