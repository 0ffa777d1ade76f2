"""Request bodies."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from modulm_server.sampling import LIMITS, SamplingFields

__all__ = ["ChatBatchRequest", "ChatRequest", "CompletionRequest"]

Metadata = Annotated[
    dict[str, Annotated[str, Meta(max_length=LIMITS.metadata_value)]],
    Meta(max_length=LIMITS.metadata),
]
Name = Annotated[str, Meta(max_length=LIMITS.name)]


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class VoiceId(Struct, kw_only=True):
    """A voice by its id."""

    id: Name


class AudioOptions(Struct, kw_only=True):
    """`audio` of a chat request. format: by default wav, or pcm16 in a stream."""

    voice: Name | VoiceId | None = None
    format: Name | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=LIMITS.messages)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Name | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    modalities: list[str] | None = None
    audio: AudioOptions | None = None
    prediction: Any = None
    web_search_options: Any = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    verbosity: Name | None = None
    safety_identifier: Name | None = None
    return_prompt_text: bool | None = None


class ChatBatchRequest(ChatRequest, kw_only=True):
    """`POST /v1/chat/completions/batch`. messages: one list for each conversation."""

    messages: Annotated[list[list[dict[str, Any]]], Meta(min_length=1)]  # type: ignore[assignment]
