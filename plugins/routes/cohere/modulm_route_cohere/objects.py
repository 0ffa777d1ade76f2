"""Cohere's response objects (https://docs.cohere.com/reference/chat)."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from modulm_server.openapi import ErrorObject

__all__ = [
    "ChatAnswer",
    "Content",
    "Failure",
    "Logprobs",
    "Message",
    "OldChatAnswer",
    "OldLine",
    "OldToolCall",
    "StreamEvent",
    "ToolCall",
    "Usage",
]


class Failure(TypedDict):
    """Cohere's error, with OpenAI's object in addition."""

    message: str
    error: ErrorObject


class Content(TypedDict):
    """Text for the user, or a thought."""

    type: Literal["text", "thinking"]
    text: NotRequired[str]
    thinking: NotRequired[str]


class Function(TypedDict):
    """A function and its arguments, as JSON in a text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: Function


class Message(TypedDict):
    """The answer of the model."""

    role: Literal["assistant"]
    content: NotRequired[list[Content]]
    tool_calls: NotRequired[list[ToolCall]]


class Tokens(TypedDict):
    """Token counts."""

    input_tokens: int
    output_tokens: int


class Usage(TypedDict):
    """Tokens of a request; cached_tokens are among the input's."""

    billed_units: Tokens
    tokens: Tokens
    cached_tokens: int


class Logprobs(TypedDict):
    """Log probabilities of the tokens of a text."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class ChatAnswer(TypedDict):
    """The answer of `POST /v2/chat`."""

    id: str
    finish_reason: str
    message: Message
    usage: Usage
    logprobs: NotRequired[list[Logprobs]]


class StreamEvent(TypedDict):
    """An event of a stream; `type` is also the event's name.

    index: of a content block or a call.
    """

    type: str
    id: NotRequired[str]
    index: NotRequired[int]
    delta: NotRequired[dict[str, Any]]
    logprobs: NotRequired[Logprobs]


class OldToolCall(TypedDict):
    """A call in version 1."""

    name: str
    parameters: dict[str, Any]


class OldChatAnswer(TypedDict):
    """The answer of `POST /v1/chat`."""

    response_id: str
    generation_id: str
    text: str
    finish_reason: str
    chat_history: list[dict[str, Any]]
    tool_calls: NotRequired[list[OldToolCall]]
    meta: dict[str, Any]


class OldLine(TypedDict):
    """A line of a stream of version 1; the last one has the whole answer, or an error."""

    event_type: str
    is_finished: bool
    generation_id: NotRequired[str]
    text: NotRequired[str]
    tool_calls: NotRequired[list[OldToolCall]]
    finish_reason: NotRequired[str]
    response: NotRequired[dict[str, Any]]
