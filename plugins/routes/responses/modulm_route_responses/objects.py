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
    "ResponseObject",
    "Usage",
]

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(TypedDict):
    """Text for the user; logprobs: where they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: NotRequired[list[TokenLogprob]]


class ReasoningText(TypedDict):
    """The text of a thought."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(TypedDict):
    """What the model said."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status


class ReasoningItem(TypedDict):
    """What the model thought."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    status: Status


class FunctionCallItem(TypedDict):
    """A call that the model wants made; its arguments are JSON in a text."""

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
    """A call that this server made; its arguments are JSON in a text. error: instead of output."""

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
    """Tokens that were found in the cache, and put there."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Tokens that were thoughts."""

    reasoning_tokens: int


class Usage(TypedDict):
    """What was read and written, in tokens."""

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


class ResponseObject(Transferred):
    """A response, as far as it is."""

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


class InputTokens(TypedDict):
    """How long the input of a response would be."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(TypedDict):
    """It is gone."""

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
    """The place of an event in its stream."""

    sequence_number: int


class StateEvent(Numbered):
    """The whole response as it is now."""

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
    """What an event within an item says of its place."""

    output_index: int
    item_id: str


class PartEvent(Within):
    """A part of a message begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText


class TextGrows(Within):
    """More text for the user."""

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
    """More of a thought."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDone(Within):
    """A whole thought."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsGrow(Within):
    """More of a call's arguments."""

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
    """A stream cannot go on."""

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
