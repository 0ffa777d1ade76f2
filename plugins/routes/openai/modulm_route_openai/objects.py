"""What is answered: OpenAI's objects (https://platform.openai.com/docs/api-reference), vLLM's
fields beside them, and a model as Anthropic shows it.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from modulm.contracts.outputs import SpecDecodeFigures
from modulm_parsing.message import OpenAICall
from modulm_server.logprobs import TokenLogprob

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionLogprobs",
    "Measured",
    "Metrics",
    "ModelCard",
    "ModelInfo",
    "ModelList",
    "ModelPage",
    "PromptLogprob",
    "Rendered",
    "ToolCallDelta",
    "Usage",
]


class PromptTokens(TypedDict):
    """Tokens of the prompt that were found in the cache."""

    cached_tokens: int


class CompletionTokens(TypedDict):
    """Tokens of the answer that were thoughts."""

    reasoning_tokens: int


class Usage(TypedDict):
    """What was read and written, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokens]
    completion_tokens_details: NotRequired[CompletionTokens]


class Metrics(TypedDict):
    """What was measured of an answer with one choice; null where nothing drafts."""

    speculative_decoding: SpecDecodeFigures | None


class Measured(TypedDict, total=False):
    """What answers have where the server or the request asks for it."""

    metrics: Metrics


class PromptLogprob(TypedDict):
    """A token at a place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class _Head(TypedDict):
    """What all answers and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class CompletionLogprobs(TypedDict):
    """Per token: where its text begins, its probability, itself, and the best of its place."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """One completion of one prompt, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class Completion(_Head, Measured):
    """The answer of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Head, Measured):
    """A chunk of a streamed completion; the last one has no choices, if usage was asked for."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]


class ChatLogprobs(TypedDict):
    """Log probabilities of the tokens."""

    content: list[TokenLogprob]


class ChatMessage(TypedDict):
    """What the model said."""

    role: str
    content: str | None
    refusal: None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: NotRequired[list[OpenAICall]]


class ChatChoice(TypedDict):
    """One answer of the model."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(_Head, Measured):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]
    prompt_token_ids: NotRequired[list[int]]


class FunctionDelta(TypedDict):
    """More of a function to call."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """More of a call; the first of its deltas has `id`, `type` and the name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    """What is new of a message."""

    role: str
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """What is new of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(_Head, Measured):
    """A chunk of a streamed answer; the last one has no choices, if usage was asked for."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]


class Rendered(TypedDict):
    """A request as the engine would get it."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    stream: bool
    cache_salt: str | None
    priority: int


class ModelCard(TypedDict):
    """A model, as OpenAI shows it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """The models, as OpenAI lists them."""

    object: Literal["list"]
    data: list[ModelCard]


class ModelInfo(TypedDict):
    """A model, as Anthropic shows it."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int
    max_tokens: int


class ModelPage(TypedDict):
    """The models, as Anthropic lists them."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool
