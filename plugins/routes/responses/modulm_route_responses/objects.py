"""Objects and events of OpenAI's Responses API
(https://platform.openai.com/docs/api-reference/responses), and conversations.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from modulm_server.logprobs import TokenLogprob
from modulm_server.transfer import Transferred

__all__ = [
    "Card",
    "Deleted",
    "Event",
    "InputTokens",
    "Item",
    "OutputText",
    "RawMessage",
    "ResponseObject",
    "Usage",
]

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(TypedDict):
    """The text of a message. logprobs: if requested."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: NotRequired[list[TokenLogprob]]


class ReasoningText(TypedDict):
    """The text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(TypedDict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status


class ReasoningItem(TypedDict):
    """The reasoning before a message or call."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    status: Status


class FunctionCallItem(TypedDict):
    """A call for the client to make. arguments: JSON text."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


class ListedTool(TypedDict):
    """A tool of a tool server. input_schema: of its arguments."""

    name: str
    description: str
    input_schema: dict[str, Any]
    annotations: None


class ListedToolsItem(TypedDict):
    """The tools of a tool server that the model may call."""

    id: str
    type: Literal["mcp_list_tools"]
    server_label: str
    tools: list[ListedTool]
    error: str | None


class HostedCallItem(TypedDict):
    """A call that this server made. arguments: JSON text. error: instead of output."""

    id: str
    type: Literal["mcp_call"]
    server_label: str
    name: str
    arguments: str
    approval_request_id: str | None
    output: str | None
    error: str | None
    status: Status


class ApprovalItem(TypedDict):
    """A call that the client must approve, with an item of type mcp_approval_response."""

    id: str
    type: Literal["mcp_approval_request"]
    server_label: str
    name: str
    arguments: str
    status: Status


Item = (
    MessageItem | ReasoningItem | FunctionCallItem | ListedToolsItem | HostedCallItem | ApprovalItem
)


class InputDetails(TypedDict):
    """Prompt tokens found in the prefix cache, and written to it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Reasoning tokens among the generated ones."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class Incomplete(TypedDict):
    """Why a response is not complete."""

    reason: str


class ConversationName(TypedDict):
    """The conversation that a response is part of."""

    id: str


class RawMessage(TypedDict):
    """A prompt, or what the model wrote, as text with its tokens."""

    type: Literal["raw_message_tokens"]
    message: str
    tokens: list[int]


class ResponseObject(Transferred):
    """A response, possibly incomplete. input_messages, output_messages: if they were requested."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: NotRequired[int]
    status: Status
    background: bool
    conversation: NotRequired[ConversationName]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt: dict[str, Any] | None
    reasoning: dict[str, Any] | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: Usage | None
    user: str | None
    input_messages: NotRequired[list[RawMessage]]
    output_messages: NotRequired[list[RawMessage]]


class InputTokens(TypedDict):
    """Token count of an input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(TypedDict):
    """A deleted response or conversation."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class Card(TypedDict):
    """A conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class Numbered(TypedDict):
    """Position of an event in its stream."""

    sequence_number: int


class StateEvent(Numbered):
    """The response at a change of its status."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.cancelled",
    ]
    response: ResponseObject


class ItemEvent(Numbered):
    """An item begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class Within(Numbered):
    """Position of an event within an item."""

    output_index: int
    item_id: str


class PartEvent(Within):
    """A part of a message begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText


class TextGrows(Within):
    """New text of a message."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(Within):
    """The whole text of a part."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningGrows(Within):
    """New text of a reasoning item."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDone(Within):
    """The whole text of a reasoning item."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsGrow(Within):
    """New text of a call's arguments."""

    type: Literal["response.function_call_arguments.delta", "response.mcp_call_arguments.delta"]
    delta: str


class ArgumentsDone(Within):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class HostedArgumentsDone(Within):
    """All arguments of a call that this server makes."""

    type: Literal["response.mcp_call_arguments.done"]
    arguments: str


class HostedCallEvent(Within):
    """A call of a tool server begins or ends."""

    type: Literal[
        "response.mcp_call.in_progress", "response.mcp_call.completed", "response.mcp_call.failed"
    ]


class FailedEvent(Numbered):
    """An error that ends a stream."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


Event = (
    StateEvent
    | ItemEvent
    | PartEvent
    | TextGrows
    | TextDone
    | ReasoningGrows
    | ReasoningDone
    | ArgumentsGrow
    | ArgumentsDone
    | HostedArgumentsDone
    | HostedCallEvent
    | FailedEvent
)
