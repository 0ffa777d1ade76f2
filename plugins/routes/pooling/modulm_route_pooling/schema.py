"""Request bodies."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from modulm_server.absent_fields import POOLING, Absent
from modulm_server.sampling import LIMITS, Salt

__all__ = [
    "ClassifyRequest",
    "CohereEmbedRequest",
    "EmbedRequest",
    "PoolRequest",
    "RerankRequest",
    "ScoreRequest",
]

Count = Annotated[int, Meta(ge=0)]


class _Common(Struct, kw_only=True):
    absent: ClassVar[Absent] = POOLING

    model: str | UnsetType = UNSET
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    prompt_name: Annotated[str, Meta(max_length=LIMITS.name)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Salt | None = None
    request_id: Annotated[str, Meta(max_length=LIMITS.name)] | None = None
    user: Annotated[str, Meta(max_length=LIMITS.metadata_value)] | None = None


class _Texts(_Common, kw_only=True):
    """Text, token ids, lists of either, or messages that make one prompt."""

    input: Any = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=LIMITS.messages)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class EmbedRequest(_Texts, kw_only=True):
    """`POST /v1/embeddings`."""

    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "sparse", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = "float32"
    endianness: Literal["native", "little", "big"] = "native"
    normalize: bool | None = None


class PoolRequest(EmbedRequest, kw_only=True):
    """`POST /pooling`."""

    task: str | None = None
    data: Any = None


class ClassifyRequest(_Texts, kw_only=True):
    """`POST /classify`."""


class _Pairs(_Common, kw_only=True):
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    max_tokens_per_query: Count = 0
    max_tokens_per_doc: Count = 0


class ScoreRequest(_Pairs, kw_only=True):
    """`POST /score`: one text with each of several, or pairs, under any of the names in use."""

    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None


class RerankRequest(_Pairs, kw_only=True):
    """`POST /rerank`."""

    query: str | dict[str, Any]
    documents: Annotated[list[Any], Meta(min_length=1, max_length=LIMITS.prompts)]
    top_n: Count | None = None
    return_documents: bool | None = None


class CohereEmbedRequest(Struct, kw_only=True):
    """`POST /v2/embed`, as Cohere has it."""

    model: str | UnsetType = UNSET
    texts: Annotated[list[str], Meta(max_length=LIMITS.prompts)] | None = None
    inputs: Annotated[list[dict[str, Any]], Meta(max_length=LIMITS.prompts)] | None = None
    images: list[str] | None = None
    input_type: Annotated[str, Meta(max_length=LIMITS.name)] | None = None
    embedding_types: (
        Annotated[list[Literal["float", "base64", "binary", "ubinary"]], Meta(max_length=16)] | None
    ) = None
    output_dimension: Annotated[int, Meta(ge=1)] | None = None
    truncate: Literal["END", "START", "NONE"] = "END"
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
