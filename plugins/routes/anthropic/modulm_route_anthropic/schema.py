"""Request bodies, and their conversion to messages, tools and parameters in OpenAI's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from attrs import evolve
from msgspec import UNSET, Meta, UnsetType

from modulm.contracts.sampling import OutputKind, SamplingParams, StructuredOutputs
from modulm_media.messages import MediaSource
from modulm_parsing import thinking_variables, variables_without_thinking
from modulm_server.absent_fields import MESSAGES, Absent
from modulm_server.constraints import (
    check_tools,
    from_response_format,
)
from modulm_server.forced_calls import ForcedCalls
from modulm_server.json_body import bad_field
from modulm_server.sampling import LIMITS, Salt, SamplerFields
from modulm_server.transfer import with_transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "TOOLSET",
    "CountRequest",
    "MessagesRequest",
    "budget_of",
    "constraint_of",
    "messages_of",
    "params_of",
    "shows_thinking",
    "tools_of",
    "variables_of",
]

#: Type of the tools of an MCP server.
TOOLSET = "mcp_toolset"


class _Conversation(SamplerFields, kw_only=True):
    absent: ClassVar[Absent] = MESSAGES

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=LIMITS.messages)]
    model: str | UnsetType = UNSET
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountRequest(_Conversation, kw_only=True):
    """`POST /v1/messages/count_tokens`."""


class MessagesRequest(_Conversation, kw_only=True):
    """`POST /v1/messages`: Anthropic's fields, and vLLM's additional ones."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    cache_salt: Salt | None = None
    kv_transfer_params: dict[str, Any] | None = None


def messages_of(body: _Conversation, model_name: Callable[[str, str], str]) -> list[dict[str, Any]]:
    """Convert the conversation to chat messages. Raises ApiError(400).

    model_name: the model's name of a tool server's tool.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _texts(body.system, "system")})
    for index, message in enumerate(body.messages):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise bad_field("messages", f"messages[{index}].role must be user or assistant")
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            if role != "user" and any(map(_is_image, content)):
                raise bad_field(
                    "messages", f"messages[{index}].content: only user messages may have images"
                )
            blocks = [
                _block(index, block_index, block) for block_index, block in enumerate(content)
            ]
            hosted = [block for block in blocks if block["type"] in _HOSTED]
            if hosted and role != "assistant":
                kind = hosted[0]["type"]
                raise bad_field(
                    "messages",
                    f"messages[{index}].content: {kind} is for assistant messages",
                )
            messages += (
                _assistant(blocks, model_name) if role == "assistant" else _user(role, blocks)
            )
        else:
            raise bad_field(
                "messages", f"messages[{index}].content must be a string or a list of blocks"
            )
    return messages


def _block(index: int, block_index: int, block: Any) -> dict[str, Any]:
    where = f"messages[{index}].content[{block_index}]"
    if not isinstance(block, dict):
        raise bad_field("messages", f"{where} must be an object with a type")
    kind = block.get("type")
    required: dict[str, dict[str, type]] = {
        "text": {"text": str},
        "image": {"source": dict},
        "thinking": {"thinking": str},
        "redacted_thinking": {},
        "tool_use": {"id": str, "name": str, "input": dict},
        "tool_result": {"tool_use_id": str},
        "mcp_tool_use": {"id": str, "name": str, "server_name": str, "input": dict},
        "mcp_tool_result": {"tool_use_id": str},
    }
    if not isinstance(kind, str) or kind not in required:
        raise bad_field(
            "messages", f"{where}: this model does not support {str(kind)[:64]!r} blocks"
        )
    for name, form in required[kind].items():
        if not isinstance(block.get(name), form):
            raise bad_field("messages", f"{where}.{name} is missing or has the wrong type")
    if kind == "image":
        return {"type": "image", "source": _image(where, block)}
    if kind == "mcp_tool_result":
        return {**block, "content": _texts(block.get("content") or "", "messages")}
    if kind == "tool_result":
        return {**block, "content": _result(where, block.get("content") or "")}
    return block


def _image(where: str, block: Mapping[str, Any]) -> MediaSource:
    """The source of an image. Raises ApiError(400)."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    name = {"base64": "data", "url": "url"}.get(str(kind), "")
    value = source.get(name) if isinstance(source, dict) else None
    if not isinstance(value, str):
        raise bad_field("messages", f"{where}.source must be base64 with data, or url with url")
    media_source = MediaSource(kind="image", field=f"{where}.source.{name}")
    return evolve(media_source, data=value) if name == "data" else evolve(media_source, url=value)


_HOSTED = ("mcp_tool_use", "mcp_tool_result")


def _result(where: str, content: Any) -> Any:
    """A tool's result: text, or parts if it has images."""
    images = isinstance(content, list) and any(_is_image(block) for block in content)
    if not images:
        return _texts(content, "messages")
    return [
        _image(f"{where}.content[{at}]", block)
        if _is_image(block)
        else {"type": "text", "text": _texts([block], "messages")}
        for at, block in enumerate(content)
    ]


def _is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _texts(value: Any, where: str) -> str:
    """Join a string or a list of text blocks."""
    if isinstance(value, str):
        return value
    texts = []
    for block in value or ():
        text = block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str):
            raise bad_field(where, f"{where}: only text blocks are supported here")
        texts.append(text)
    return "\n".join(texts)


def _assistant(
    blocks: Sequence[Mapping[str, Any]], model_name: Callable[[str, str], str]
) -> Iterator[dict[str, Any]]:
    """Yield one message, or several if thoughts or results occur between texts or calls."""
    turn: list[Mapping[str, Any]] = []
    for block in blocks:
        kind = block["type"]
        thinks_again = kind == "thinking" and any(b["type"] != "thinking" for b in turn)
        has_result = bool(turn) and turn[-1]["type"] == "mcp_tool_result" != kind
        if thinks_again or has_result:
            yield from _one_turn(turn, model_name)
            turn = []
        if kind != "redacted_thinking":
            turn.append(block)
    if turn or not blocks:
        yield from _one_turn(turn, model_name)


def _one_turn(
    blocks: Sequence[Mapping[str, Any]], model_name: Callable[[str, str], str]
) -> Iterator[dict[str, Any]]:
    """Yield a message, and the results of tool servers."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block["text"] for block in blocks if block["type"] == "text"),
    }
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    calls = [block for block in blocks if block["type"] in ("tool_use", "mcp_tool_use")]
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": model_name(call["server_name"], call["name"])
                    if call["type"] == "mcp_tool_use"
                    else call["name"],
                    "arguments": msgspec.json.encode(call["input"]).decode(),
                },
            }
            for call in calls
        ]
    yield message
    for block in blocks:
        if block["type"] == "mcp_tool_result":
            result = {"tool_call_id": block["tool_use_id"], "content": block["content"]}
            yield {"role": "tool", **result}


def _user(role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield tool results first, then the user's own content."""
    for block in blocks:
        if block["type"] == "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": block["tool_use_id"],
                "content": block["content"],
            }
    contents = [block for block in blocks if block["type"] in ("text", "image")]
    if any(block["type"] == "image" for block in contents):
        parts = [block["source"] if block["type"] == "image" else block for block in contents]
        yield {"role": role, "content": parts}
    elif contents:
        yield {"role": role, "content": "\n".join(block["text"] for block in contents)}


def tools_of(
    body: _Conversation, hosted: Sequence[Mapping[str, Any]]
) -> tuple[tuple[dict[str, Any], ...], Any, bool]:
    """Convert tools; returns (tools, choice, whether calls may be parallel).

    hosted: functions of tool servers, in OpenAI's form.
    """
    chat_tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") == TOOLSET:
            continue
        if tool.get("type", "custom") != "custom":
            raise bad_field("tools", f"tools[{index}]: tools of the server have the type {TOOLSET}")
        function = {"name": tool.get("name"), "description": tool.get("description") or ""}
        if tool.get("strict") is True:
            function["strict"] = True
        schema = tool.get("input_schema", {"type": "object"})
        chat_tools.append({"type": "function", "function": {**function, "parameters": schema}})
    tools = check_tools([*chat_tools, *map(dict, hosted)], "input_schema")
    choice = body.tool_choice or {"type": "auto" if tools else "none"}
    parallel = not choice.get("disable_parallel_tool_use", False)
    kind = choice.get("type")
    if kind == "tool":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}, parallel
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in choices:
        raise bad_field("tool_choice", "tool_choice.type must be auto, any, tool or none")
    return tools, choices[kind], parallel


def variables_of(
    body: _Conversation, reasoning_parser: str | None, disabled_effort: str = "auto"
) -> dict[str, Any]:
    """The template variables for `thinking` and `output_config.effort`. disabled_effort:
    `--anthropic-disabled-thinking-effort`. Raises ApiError(400).
    """
    thinks: bool | None = None
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise bad_field("thinking", "thinking.type must be enabled, adaptive or disabled")
        if body.thinking.get("display") not in (None, "summarized", "omitted"):
            raise bad_field("thinking", "thinking.display must be summarized or omitted")
        if unknown := body.thinking.keys() - {"type", "display", "budget_tokens"}:
            raise bad_field("thinking", f"thinking has no field {min(unknown)[:64]!r}")
        thinks = kind != "disabled"
        budget_of(body)
    config = body.output_config or {}
    if unknown := config.keys() - {"effort", "format"}:
        raise bad_field(
            "output_config", f"output_config has no field {min(unknown)[:64]!r}, only {_CONFIG}"
        )
    effort = config.get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise bad_field(
            "output_config", f"output_config.effort must be one of {', '.join(_EFFORTS)}"
        )
    if thinks is not False:
        variables = thinking_variables(reasoning_parser, effort, thinks)
    elif disabled_effort == "auto":
        variables = variables_without_thinking(reasoning_parser)
    else:
        thinks = disabled_effort != "none"
        variables = thinking_variables(reasoning_parser, "low" if thinks else None, thinks)
    return {**variables, **(body.chat_template_kwargs or {})}


def budget_of(body: _Conversation) -> int | None:
    """`thinking.budget_tokens`. Raises ApiError(400)."""
    thinking = body.thinking or {}
    budget = thinking.get("budget_tokens")
    if budget is None:
        return None
    if thinking.get("type") != "enabled":
        raise bad_field("thinking", "thinking.budget_tokens needs type enabled")
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 < budget < 2**31:
        raise bad_field("thinking", "thinking.budget_tokens must be a positive integer")
    return budget


def shows_thinking(body: MessagesRequest) -> bool:
    """Whether the response includes thoughts."""
    disabled = (body.thinking or {}).get("type") == "disabled"
    return not disabled and body.include_reasoning is not False


_CONFIG = "effort and format"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def constraint_of(
    body: _Conversation, forced_calls: ForcedCalls
) -> tuple[str, StructuredOutputs] | None:
    """The request's constraint with its field, or None. Raises ApiError(400).

    `output_format` is the older name of `output_config.format`.
    """
    formats = {"output_format": body.output_format}
    formats["output_config"] = (body.output_config or {}).get("format")
    constraints = {
        name: _schema_of(form, name) for name, form in formats.items() if form is not None
    }
    return forced_calls.combine(**constraints)


def _schema_of(output_format: Any, where: str) -> StructuredOutputs | None:
    if not isinstance(output_format, dict) or output_format.get("type") != "json_schema":
        raise bad_field(where, f"{where} must be a format of type json_schema")
    return from_response_format({"type": "json_schema", "json_schema": output_format}, where)


def params_of(
    body: MessagesRequest,
    defaults: Mapping[str, Any],
    constraint: StructuredOutputs | None,
    budget: int | None,
) -> SamplingParams:
    """Build sampling parameters. defaults: the model's; budget: of thinking tokens."""
    values = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    chosen = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(
        **{
            **defaults,
            **chosen,
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "structured_outputs": constraint,
            "thinking_token_budget": budget,
            "extra_args": with_transfer(body.arguments(), body.kv_transfer_params),
            "output_kind": OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        }
    )
