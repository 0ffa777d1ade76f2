"""The request body, and its conversion to messages, tools and constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from uuid import uuid4

from msgspec import UNSET, Meta, UnsetType

from modulm.contracts.sampling import OutputKind, SamplingParams, StructuredOutputs
from modulm_media.messages import MediaSource, part_kind, source_of
from modulm_server.absent_fields import RESPONSES, Absent
from modulm_server.constraints import (
    allowed_tools,
    check_tools,
    from_response_format,
    from_structured,
)
from modulm_server.forced_calls import ForcedCalls
from modulm_server.json_body import bad_field
from modulm_server.prompt_caching import held_prompt, with_held
from modulm_server.sampling import (
    LIMITS,
    Budget,
    Priority,
    Salt,
    SamplerFields,
    StructuredFields,
)
from modulm_server.transfer import with_transfer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from modulm_media.flags import MediaKind

__all__ = [
    "LOGPROBS",
    "ResponsesRequest",
    "choice_of",
    "constraint_of",
    "effort_of",
    "in_pieces",
    "items_of",
    "messages_of",
    "params_of",
    "tools_of",
    "wants_logprobs",
]

#: The value of `include` that requests log probabilities.
LOGPROBS = "message.output_text.logprobs"

Metadata = Annotated[
    dict[str, Annotated[str, Meta(max_length=LIMITS.metadata_value)]],
    Meta(max_length=LIMITS.metadata),
]
Name = Annotated[str, Meta(max_length=LIMITS.name)]


class ResponsesRequest(SamplerFields, kw_only=True):
    """`POST /v1/responses`: OpenAI's fields, and vLLM's additional ones."""

    absent: ClassVar[Absent] = RESPONSES

    input: Any = None
    model: str | UnsetType = UNSET
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Name | None = None
    request_id: Name | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    metadata: Metadata | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: str | None = None
    truncation: str | None = None
    include: list[str] | None = None
    service_tier: str | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    enable_response_messages: bool | None = None
    thinking_token_budget: Budget | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: StructuredFields | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    kv_transfer_params: dict[str, Any] | None = None


def effort_of(body: ResponsesRequest) -> str | None:
    """`reasoning.effort`. Raises ApiError(400)."""
    reasoning = body.reasoning or {}
    effort = reasoning.get("effort")
    if not isinstance(effort, str | None):
        raise bad_field("reasoning", "reasoning.effort must be a string")
    if reasoning.get("summary") not in (None, "auto", "concise", "detailed"):
        raise bad_field("reasoning", "reasoning.summary must be auto, concise or detailed")
    return effort


def messages_of(request_input: Any, *, needed: bool = True) -> list[dict[str, Any]]:
    """Convert `input` to chat messages. needed: reject an empty input. Raises ApiError(400)."""
    if not needed and not request_input and request_input != "":
        return []
    if isinstance(request_input, str):
        return [{"role": "user", "content": request_input}]
    if not isinstance(request_input, list) or not 0 < len(request_input) <= LIMITS.messages:
        raise bad_field(
            "input", f"input must be a string, or a list of 1 to {LIMITS.messages} items"
        )
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(request_input):
        _add(messages, index, item)
    return messages


def _add(messages: list[dict[str, Any]], index: int, item: Any) -> None:
    if not isinstance(item, dict):
        raise bad_field("input", f"input[{index}] must be an object")
    kind = item.get("type", "message")
    if kind == "message":
        message = _message(index, item)
        if message["role"] == "assistant" and _only_thought(messages):
            messages[-1]["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        call = _check_strings(index, item, "call_id", "name", "arguments")
        function = {"name": call["name"], "arguments": call["arguments"]}
        _assistant(messages).setdefault("tool_calls", []).append(
            {"id": call["call_id"], "type": "function", "function": function}
        )
    elif kind == "function_call_output":
        call_id = _check_strings(index, item, "call_id")["call_id"]
        content = _content(index, item.get("output"))
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "mcp_call":
        _add_hosted_call(messages, index, item)
    elif kind in _WITHOUT_MESSAGE:
        pass
    elif kind == "reasoning":
        thought = _text(index, item.get("content") or item.get("summary") or [])
        if thought:
            _think(messages, thought)
    else:
        raise bad_field(
            "input", f"input[{index}]: items of type {str(kind)[:64]!r} are not supported"
        )


def _add_hosted_call(messages: list[dict[str, Any]], index: int, item: Mapping[str, Any]) -> None:
    """Add a call that the server made, and its result."""
    call = _check_strings(index, item, "id", "name", "arguments")
    function = {"name": call["name"], "arguments": call["arguments"]}
    calls = _assistant(messages).setdefault("tool_calls", [])
    calls.append({"id": call["id"], "type": "function", "function": function})
    error = item.get("error")
    result = item.get("output") if error is None else f"Error: {error}"
    content = result if isinstance(result, str) else ""
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def items_of(request_input: Any) -> list[dict[str, Any]]:
    """Convert `input` to items with ids, for `GET /v1/responses/{id}/input_items`."""
    items = (
        [{"role": "user", "content": request_input}]
        if isinstance(request_input, str)
        else request_input
    )
    return [_item(item) for item in items or ()]


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    item_object = {**item, "type": kind, "id": item.get("id") or f"{_PREFIXES[kind]}_{uuid4().hex}"}
    if kind == "message":
        item_object.setdefault("status", "completed")
        if isinstance(item_object["content"], str):
            part = "output_text" if item_object["role"] == "assistant" else "input_text"
            item_object["content"] = [{"type": part, "text": item_object["content"]}]
    return item_object


_PREFIXES = {
    "function_call": "fc",
    "function_call_output": "fco",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcprs",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "message": "msg",
    "reasoning": "rs",
}


#: Items that the model does not see.
_WITHOUT_MESSAGE = ("mcp_approval_request", "mcp_approval_response", "mcp_list_tools")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message to add a call to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _think(messages: list[dict[str, Any]], thought: str) -> None:
    """Add a thought, which belongs to the next content or call."""
    if _only_thought(messages):
        messages[-1]["reasoning_content"] += thought
    else:
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought})


def _only_thought(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the conversation ends with a thought without content or calls."""
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not (last["content"] or last.get("tool_calls"))


def _message(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise bad_field(
            "input", f"input[{index}].role must be user, assistant, system or developer"
        )
    if role == "user":
        return {"role": role, "content": _content(index, item.get("content"))}
    return {"role": role, "content": _text(index, item.get("content"))}


def _content(index: int, content: Any) -> Any:
    """Convert content to text, or to parts if it has media."""
    kinds = [_kind(part) for part in content] if isinstance(content, list) else []
    if not any(kinds):
        return _text(index, content)
    return [
        {"type": "text", "text": _text(index, [part])} if kind is None else _source(index, at, part)
        for at, (kind, part) in enumerate(zip(kinds, content, strict=True))
    ]


def _kind(part: Any) -> MediaKind | None:
    if isinstance(part, dict) and part.get("type") == "input_file":
        return "image"
    return part_kind(part)


def _source(index: int, at: int, part: Mapping[str, Any]) -> MediaSource:
    where = f"input[{index}].content[{at}]"
    if part.get("file_id") is not None:
        raise bad_field("input", f"{where}.file_id is not supported; send the file itself")
    if part.get("type") != "input_file":
        return source_of(_kind(part) or "image", part, where)
    for name in ("file_data", "file_url"):
        url = part.get(name)
        if isinstance(url, str):
            return MediaSource(kind="image", field=f"{where}.{name}", url=url)
    raise bad_field("input", f"{where} must have an image in file_data or file_url")


def _check_strings(index: int, item: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        if not isinstance(item.get(name), str):
            raise bad_field("input", f"input[{index}].{name} must be a string")
    return item


def _text(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise bad_field("input", f"input[{index}] must be text or a list of text parts")
        texts.append(text)
    return "".join(texts)


def tools_of(
    body: ResponsesRequest, hosted: Sequence[dict[str, Any]] = ()
) -> tuple[dict[str, Any], ...]:
    """Convert tools to the form of the chat API. hosted: those of tool servers, in that form."""
    chat_tools = [*hosted]
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") == "mcp":
            continue
        if tool.get("type") != "function":
            raise bad_field(
                "tools", f"tools[{index}]: only tools of type function and mcp are supported"
            )
        known = ("name", "description", "parameters", "strict")
        function = {key: tool[key] for key in known if tool.get(key) is not None}
        chat_tools.append({"type": "function", "function": function})
    return check_tools(chat_tools, "parameters")


def choice_of(
    body: ResponsesRequest, tools: Sequence[Mapping[str, Any]]
) -> tuple[Any, tuple[Mapping[str, Any], ...]]:
    """Convert the tool choice; returns (choice in the chat API's form, callable tools)."""
    choice, allowed = allowed_tools(body.tool_choice or ("auto" if tools else "none"), tools)
    if not isinstance(choice, str):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return choice, allowed


def constraint_of(
    body: ResponsesRequest, forced_calls: ForcedCalls
) -> tuple[str, StructuredOutputs] | None:
    """The request's constraint with its field, or None."""
    format_ = (body.text or {}).get("format") or {"type": "text"}
    if not isinstance(format_, dict):
        raise bad_field("text", "text.format must be an object")
    if format_.get("type") == "json_schema":
        format_ = {"type": "json_schema", "json_schema": format_}
    constraints = {"text": from_response_format(format_, "text")}
    if body.structured_outputs is not None:
        structured = from_structured(body.structured_outputs, "structured_outputs")
        constraints["structured_outputs"] = structured
    return forced_calls.combine(**constraints)


_SAMPLING = (
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "thinking_token_budget",
    "top_k",
    "top_p",
)


def params_of(
    body: ResponsesRequest, defaults: Mapping[str, Any], constraint: StructuredOutputs | None
) -> SamplingParams:
    """Build sampling parameters. defaults: the model's."""
    values = {name: getattr(body, name) for name in _SAMPLING}
    chosen = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(
        **{
            "max_tokens": None,
            **defaults,
            **chosen,
            **({} if body.max_output_tokens is None else {"max_tokens": body.max_output_tokens}),
            "structured_outputs": constraint,
            "extra_args": with_transfer(
                with_held(
                    body.arguments(),
                    held_prompt(body.prompt_cache_key, body.prompt_cache_retention),
                ),
                body.kv_transfer_params,
            ),
            "logprobs": (body.top_logprobs or 0) if wants_logprobs(body) else None,
            "output_kind": OutputKind.DELTA if in_pieces(body) else OutputKind.FINAL_ONLY,
        }
    )


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether log probabilities are requested."""
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def in_pieces(body: ResponsesRequest) -> bool:
    """Whether to request deltas from the engine: for streaming, or to match tokens to text."""
    return bool(body.stream) or wants_logprobs(body)
