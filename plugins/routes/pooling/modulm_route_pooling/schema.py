"""Request bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from modulm.server.sampling import LIMITS

__all__ = ["ClassifyRequest", "EmbedRequest", "PoolRequest", "RerankRequest", "ScoreRequest"]


class _Common(Struct, kw_only=True):
    model: str | UnsetType = UNSET
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    user: Annotated[str, Meta(max_length=LIMITS.metadata_value)] | None = None
    use_activation: bool | None = None


class EmbedRequest(_Common, kw_only=True):
    """`POST /v1/embeddings`: `input` in any form that prompts have, or messages."""

    input: Any = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=LIMITS.messages)] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None


class PoolRequest(EmbedRequest, kw_only=True):
    """`POST /pooling`."""

    task: str | None = None


class ClassifyRequest(_Common, kw_only=True):
    """`POST /classify`."""

    input: Any = None


class ScoreRequest(_Common, kw_only=True):
    """`POST /score`: one text with each of several, or pairs."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankRequest(_Common, kw_only=True):
    """`POST /rerank`."""

    query: str
    documents: Annotated[list[Any], Meta(min_length=1, max_length=LIMITS.prompts)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
