"""Response objects of OpenAI (https://platform.openai.com/docs/api-reference) with vLLM's
additional fields, and Anthropic's model object.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from modulm_frontend.draft_metrics import SpecDecodeFigures
from modulm_parsing.message import OpenAICall
from modulm_server.hosted_turns import HostedCall
from modulm_server.logprobs import TokenLogprob
from modulm_server.transfer import Transferred

__all__ = [
    "ApprovalRequest",
    "ChatAudio",
    "ChatAudioDelta",
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
    "ModelState",
    "PromptLogprob",
    "ToolCallDelta",
    "Usage",
    "WeightVersion",
]


class PromptTokens(TypedDict):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokens(TypedDict, total=False):
    """Tokens of the output that are thoughts, and those that are frames of sound."""

    reasoning_tokens: int
    audio_tokens: int


class Usage(TypedDict):
    """Token counts of prompt and output."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokens]
    completion_tokens_details: NotRequired[CompletionTokens]


class Metrics(TypedDict):
    """Metrics of a response with one choice. speculative_decoding: null without a drafter. The
    times are those of a server with --enable-per-request-metrics; null below two tokens.
    """

    speculative_decoding: SpecDecodeFigures | None
    time_to_first_token_ms: NotRequired[float | None]
    generation_time_ms: NotRequired[float | None]
    queue_time_ms: NotRequired[float | None]
    mean_itl_ms: NotRequired[float | None]
    tokens_per_second: NotRequired[float | None]


class Measured(TypedDict, total=False):
    """Optional metrics of a response."""

    metrics: Metrics


class PromptLogprob(TypedDict):
    """A candidate token at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class WeightVersion(TypedDict):
    """The version of the weights that generated the tokens of a choice from `start` to `end`."""

    version: str
    start: int
    end: int


class _Head(TypedDict):
    """The common fields of responses and chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class CompletionLogprobs(TypedDict):
    """Per token: its text offset, log probability, text, and the top candidates."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """A completion of a prompt, or a delta of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    weight_versions: NotRequired[list[WeightVersion]]
    routed_experts: NotRequired[str]


class Completion(_Head, Measured, Transferred):
    """The response of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Head, Measured, Transferred):
    """A chunk of a streamed completion. With usage, the last one has no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]


class ChatLogprobs(TypedDict):
    """Log probabilities of the tokens."""

    content: list[TokenLogprob]


class ApprovalRequest(TypedDict):
    """A call of a tool server that waits for the client's approval. id: of the call."""

    id: str
    server_label: str
    name: str


class ChatAudio(TypedDict):
    """An answer in sound. data: a file in base64. expires_at: 0, since the server keeps none.
    transcript: the answer's text.
    """

    id: str
    data: str
    expires_at: int
    transcript: str


class ChatAudioDelta(TypedDict):
    """A delta of an answer in sound. data: samples of 16 bits in base64."""

    id: str
    data: NotRequired[str]
    expires_at: NotRequired[int]
    transcript: NotRequired[str]


class ChatMessage(TypedDict):
    """The message of the model. content: None if the answer is spoken."""

    role: str
    content: str | None
    refusal: None
    reasoning: str | None
    reasoning_content: str | None
    audio: NotRequired[ChatAudio]
    tool_calls: NotRequired[list[OpenAICall]]
    mcp_calls: NotRequired[list[HostedCall]]
    mcp_approval_requests: NotRequired[list[ApprovalRequest]]


class ChatChoice(TypedDict):
    """A choice of a chat response."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    weight_versions: NotRequired[list[WeightVersion]]
    routed_experts: NotRequired[str]


class ChatCompletion(_Head, Measured, Transferred):
    """The response of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str | None]


class FunctionDelta(TypedDict):
    """A delta of a function call."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A delta of a tool call. Its first delta has `id`, `type` and the name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    """A delta of a message."""

    role: str
    content: str
    reasoning: str
    reasoning_content: str
    audio: ChatAudioDelta
    tool_calls: list[ToolCallDelta]
    mcp_calls: list[HostedCall]
    mcp_approval_requests: list[ApprovalRequest]


class ChatChunkChoice(TypedDict):
    """A delta of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    weight_versions: NotRequired[list[WeightVersion]]


class ChatChunk(_Head, Measured, Transferred):
    """A chunk of a streamed chat response. With usage, the last one has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]
    prompt_text: NotRequired[str | None]


class ModelState(TypedDict):
    """What a server of several models says about one. value: unloaded, loading, loaded, sleeping,
    stopping or failed. memory: in bytes, an estimate for a model that is not loaded. Times are Unix
    seconds.
    """

    value: str
    error: str | None
    memory: int
    memory_budget: int | None
    last_used: float | None
    expires_at: float | None
    pinned: bool
    active_requests: int
    waiting_requests: int


class ModelCard(TypedDict):
    """A model in OpenAI's form. max_model_len: None before the model was first loaded.
    plugins_lock: SHA-256 of the server's --plugins-lock, in hexadecimal.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    status: NotRequired[ModelState]
    tasks: NotRequired[list[str]]
    plugins_lock: NotRequired[str]


class ModelList(TypedDict):
    """The list of models in OpenAI's form."""

    object: Literal["list"]
    data: list[ModelCard]


class ModelInfo(TypedDict):
    """A model in Anthropic's form."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int
    max_tokens: int


class ModelPage(TypedDict):
    """The list of models in Anthropic's form."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool
