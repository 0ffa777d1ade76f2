"""Anthropic's response objects (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from modulm_server.openapi import ErrorObject
from modulm_server.transfer import Transferred

__all__ = [
    "Block",
    "BlockDelta",
    "Event",
    "Failure",
    "Message",
    "Opening",
    "Stop",
    "StreamEvent",
    "TokenCount",
    "Usage",
    "WholeMessage",
    "Written",
]


class Failure(TypedDict):
    """Anthropic's error, with OpenAI's `param` and `code` beside its own fields."""

    type: Literal["error"]
    error: ErrorObject


class TokenCount(TypedDict):
    """How long a conversation is."""

    input_tokens: int


class Text(TypedDict):
    """Text for the user."""

    type: Literal["text"]
    text: str


class Thinking(TypedDict):
    """A thought; the signature names it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUse(TypedDict):
    """A call that the model wants made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class HostedToolUse(TypedDict):
    """A call that the server made, of a tool server."""

    type: Literal["mcp_tool_use"]
    id: str
    name: str
    server_name: str
    input: dict[str, Any]


class HostedToolResult(TypedDict):
    """The result of a call that the server made."""

    type: Literal["mcp_tool_result"]
    tool_use_id: str
    is_error: bool
    content: list[Text]


Block = Text | Thinking | ToolUse | HostedToolUse | HostedToolResult


class Thoughts(TypedDict):
    """Tokens of the answer that were thoughts."""

    thinking_tokens: int


class Written(TypedDict):
    """The part of usage that is about the answer."""

    output_tokens: int
    output_tokens_details: NotRequired[Thoughts]


class CacheCreation(TypedDict):
    """Tokens that were newly cached, by how long they are held."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class Usage(Written):
    """What was read, found in the cache, newly held in it, and written, in tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation


class Opening(TypedDict):
    """What a message begins with."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str


class Stop(TypedDict):
    """Why a message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class Message(Opening, Stop):
    """A message, as far as it is."""

    content: list[Block]
    usage: Usage


class WholeMessage(Message, Transferred):
    """The answer of `POST /v1/messages`."""


class MessageStart(TypedDict):
    """A stream begins; the message is still empty."""

    type: Literal["message_start"]
    message: Message


class Ping(TypedDict):
    """A sign of life."""

    type: Literal["ping"]


class BlockStart(TypedDict):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(TypedDict):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """More of a thought."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    """The name of a thought, at its end."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    """More of a call's arguments, as JSON in a text."""

    type: Literal["input_json_delta"]
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockGrows(TypedDict):
    """More of the block that is open."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockDelta


class BlockStop(TypedDict):
    """A block ends."""

    type: Literal["content_block_stop"]
    index: int


class MessageDelta(Transferred):
    """Why the message ended, and what it took."""

    type: Literal["message_delta"]
    delta: Stop
    usage: Written


class MessageStop(TypedDict):
    """A stream ends."""

    type: Literal["message_stop"]


#: Of content blocks.
Event = BlockStart | BlockGrows | BlockStop
#: Of a whole stream.
StreamEvent = MessageStart | Ping | Event | MessageDelta | MessageStop | Failure
