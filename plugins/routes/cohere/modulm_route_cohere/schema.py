"""Request bodies, and their conversion to messages, tools and parameters in OpenAI's form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from modulm.contracts.sampling import OutputKind, SamplingParams, StructuredOutputs
from modulm_parsing import thinking_variables
from modulm_server.absent_fields import MESSAGES, Absent
from modulm_server.constraints import check_tools, from_response_format
from modulm_server.json_body import bad_field
from modulm_server.sampling import LIMITS, Priority, Salt, SamplerFields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "ChatRequest",
    "OldChatRequest",
    "constraint_of",
    "documents_of",
    "messages_of",
    "params_of",
    "tools_of",
    "updated",
    "variables_of",
]

Penalty = Annotated[float, Meta(ge=0, le=1)]


class _Settings(SamplerFields, kw_only=True):
    """The fields of both versions: Cohere's, and vLLM's additional ones."""

    absent: ClassVar[Absent] = MESSAGES

    model: str | UnsetType = UNSET
    documents: list[str | dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF", "NONE"] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    k: Annotated[int, Meta(ge=0)] | None = None
    p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(_Settings, kw_only=True):
    """`POST /v2/chat`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=LIMITS.messages)]
    tools: list[dict[str, Any]] | None = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    citation_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    thinking: dict[str, Any] | None = None


class OldChatRequest(_Settings, kw_only=True):
    """`POST /v1/chat`."""

    absent: ClassVar[Absent] = Absent(
        refused={
            **MESSAGES.refused,
            "connectors": "search yourself, and send the results as documents",
            "conversation_id": "send the earlier messages in chat_history",
            "search_queries_only": "ask the model for search queries, or send a tool",
            "raw_prompting": "use /v1/completions",
            "max_input_tokens": "--max-model-len limits all requests",
        },
        no_effect={
            "prompt_truncation": "prompts that are too long are refused",
            "citation_quality": "answers have no citations",
            "force_single_step": "each answer is one step",
        },
    )

    message: str
    preamble: str | None = None
    chat_history: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_results: list[dict[str, Any]] | None = None


def messages_of(body: ChatRequest) -> list[dict[str, Any]]:
    """Convert the conversation to chat messages. Raises ApiError(400)."""
    return [_message(f"messages[{index}]", one) for index, one in enumerate(body.messages)]


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    match role:
        case "system" | "developer":
            return {"role": "system", "content": _text(f"{where}.content", content)}
        case "user":
            return {"role": "user", "content": _user_content(f"{where}.content", content)}
        case "assistant":
            return _assistant(where, message)
        case "tool":
            call_id = message.get("tool_call_id")
            if not isinstance(call_id, str):
                raise bad_field("messages", f"{where}.tool_call_id must be a string")
            text = _text(f"{where}.content", content)
            return {"role": "tool", "tool_call_id": call_id, "content": text}
    raise bad_field("messages", f"{where}.role must be user, assistant, system or tool")


def _parts(where: str, content: Any, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The parts of a content; each has one of the types `kinds`, and a field of that name."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_field("messages", f"{where} must be a string or a list of parts")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            types = " or ".join(kinds)
            raise bad_field("messages", f"{where}[{index}].type must be {types}")
        form = str if kind in ("text", "thinking") else dict
        if not isinstance(part.get(kind), form):
            raise bad_field("messages", f"{where}[{index}].{kind} is missing or has the wrong type")
    return content


def _text(where: str, content: Any) -> str:
    """The text of a content; a document is written as JSON."""
    parts = _parts(where, content, ("text", "document"))
    return "\n".join(
        part["text"] if part["type"] == "text" else json.dumps(part["document"].get("data"))
        for part in parts
    )


def _user_content(where: str, content: Any) -> str | list[dict[str, Any]]:
    """Text, or parts if there are images."""
    parts = _parts(where, content, ("text", "image_url"))
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _assistant(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    parts = _parts(f"{where}.content", message.get("content") or [], ("text", "thinking"))
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(part["text"] for part in parts if part["type"] == "text"),
    }
    thoughts = "".join(part["thinking"] for part in parts if part["type"] == "thinking")
    plan = message.get("tool_plan")
    if isinstance(plan, str) and plan:
        answer["tool_plan"] = plan
    if thoughts or answer.get("tool_plan"):
        answer["reasoning_content"] = thoughts or plan
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise bad_field(
                "messages",
                f"{where}.tool_calls must be a list of objects with id and function, which has "
                "name and arguments (JSON in a string)",
            )
        answer["tool_calls"] = [{"type": "function", **call} for call in calls]
    return answer


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        return False
    return all(isinstance(function.get(name), str) for name in ("name", "arguments"))


def documents_of(body: _Settings) -> list[dict[str, Any]] | None:
    """The documents for the template: a text as `text`, an object by its data."""
    if body.documents is None:
        return None
    documents = []
    for index, document in enumerate(body.documents):
        if isinstance(document, str):
            documents.append({"text": document})
            continue
        data = document.get("data", {k: v for k, v in document.items() if k != "id"})
        if isinstance(data, str):
            data = {"text": data}
        if not isinstance(data, dict) or not data:
            raise bad_field("documents", f"documents[{index}].data must be an object or a string")
        identity = {"id": document["id"]} if "id" in document else {}
        documents.append({**identity, **data})
    return documents


def tools_of(body: ChatRequest) -> tuple[tuple[dict[str, Any], ...], str]:
    """Convert tools; returns (tools, choice in OpenAI's form). Raises ApiError(400)."""
    tools = []
    for index, tool in enumerate(body.tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise bad_field("tools", f"tools[{index}] must have type function, and a function")
        strict = {"strict": True} if body.strict_tools else {}
        tools.append({"type": "function", "function": {**function, **strict}})
    if body.tool_choice == "REQUIRED" and not tools:
        raise bad_field("tool_choice", "tool_choice REQUIRED needs tools")
    if not tools or body.tool_choice == "NONE":
        return check_tools(tools), "none"
    return check_tools(tools), "required" if body.tool_choice == "REQUIRED" else "auto"


def variables_of(body: ChatRequest, reasoning_parser: str | None) -> dict[str, Any]:
    """The template variables, for thoughts and safety among others. Raises ApiError(400)."""
    thinks = None
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled"):
            raise bad_field("thinking", "thinking.type must be enabled or disabled")
        thinks = kind == "enabled"
    variables = thinking_variables(reasoning_parser, None, thinks, "thinking")
    if body.safety_mode is not None:
        variables["safety_mode"] = "NONE" if body.safety_mode == "OFF" else body.safety_mode
    return {**variables, **(body.chat_template_kwargs or {})}


def _budget(body: ChatRequest) -> int | None:
    budget = (body.thinking or {}).get("token_budget")
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 < budget < 2**31:
        raise bad_field("thinking", "thinking.token_budget must be a positive integer")
    return budget


def constraint_of(body: _Settings) -> StructuredOutputs | None:
    """The constraint of `response_format`. Raises ApiError(400)."""
    form = body.response_format
    if form is None:
        return None
    if form.get("type") not in ("text", "json_object"):
        raise bad_field("response_format", "response_format.type must be text or json_object")
    schema = form.get("json_schema", form.get("schema"))
    named = {} if schema is None else {"schema": schema}
    return from_response_format({"type": form["type"], **named})


def params_of(
    body: ChatRequest,
    defaults: Mapping[str, Any],
    constraint: StructuredOutputs | None,
    *,
    counts_thoughts: bool,
) -> SamplingParams:
    """Build sampling parameters. defaults: the model's; counts_thoughts: a reasoning parser can
    count the tokens of a thinking budget. Raises ApiError(400).
    """
    if (body.citation_options or {}).get("mode", "OFF") != "OFF":
        raise bad_field(
            "citation_options", "citation_options.mode: answers have no citations; use OFF"
        )
    budget = _budget(body)
    values = {
        "temperature": body.temperature,
        "top_p": body.p,
        "top_k": body.k,
        "seed": body.seed,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
    }
    chosen = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(
        **{
            **defaults,
            **chosen,
            "max_tokens": body.max_tokens or defaults.get("max_tokens"),
            "stop": body.stop_sequences,
            "logprobs": 0 if body.logprobs else None,
            "structured_outputs": constraint,
            "thinking_token_budget": budget if counts_thoughts else None,
            "extra_args": body.arguments(),
            "output_kind": OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        }
    )


_OLD_ROLES = {"USER": "user", "CHATBOT": "assistant", "SYSTEM": "system"}
#: Types of Cohere's older tools, by JSON schema's.
_TYPES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean",
    "list": "array", "dict": "object",
}  # fmt: skip


def updated(body: OldChatRequest) -> ChatRequest:
    """Convert a request of version 1 to one of version 2. Raises ApiError(400)."""
    messages: list[dict[str, Any]] = []
    if body.preamble:
        messages.append({"role": "system", "content": body.preamble})
    for index, old in enumerate(body.chat_history or ()):
        messages += _old_message(f"chat_history[{index}]", old, len(messages))
    if body.tool_results:
        if body.message:
            messages.append({"role": "user", "content": body.message})
        messages += _old_results("tool_results", body.tool_results, len(messages))
    else:
        messages.append({"role": "user", "content": body.message})
    shared = {name: getattr(body, name) for name in _Settings.__struct_fields__}
    tools = [_old_tool(index, tool) for index, tool in enumerate(body.tools or ())]
    return ChatRequest(messages=messages, tools=tools or None, **shared)


def _old_message(where: str, message: Mapping[str, Any], before: int) -> Iterator[dict[str, Any]]:
    role, field = message.get("role"), where.partition("[")[0]
    if role == "TOOL":
        yield from _old_results(f"{where}.tool_results", message.get("tool_results"), before)
        return
    if not isinstance(role, str) or role not in _OLD_ROLES:
        raise bad_field(field, f"{where}.role must be USER, CHATBOT, SYSTEM or TOOL")
    text = message.get("message") or ""
    if not isinstance(text, str):
        raise bad_field(field, f"{where}.message must be a string")
    if role == "CHATBOT" and message.get("tool_calls"):
        return  # the results that follow repeat the calls
    yield {"role": _OLD_ROLES[role], "content": text}


def _old_results(where: str, results: Any, before: int) -> Iterator[dict[str, Any]]:
    """Yield a message with calls, and their results. before: messages so far, to name the calls."""
    field = where.partition("[")[0]
    calls, answers = [], []
    for index, result in enumerate(results if isinstance(results, list) else [None]):
        call = result.get("call") if isinstance(result, dict) else None
        outputs = result.get("outputs") if isinstance(result, dict) else None
        if not isinstance(call, dict) or not isinstance(outputs, list):
            raise bad_field(field, f"{where} must be a list of objects with call and outputs")
        name, parameters = call.get("name"), call.get("parameters", {})
        if not isinstance(name, str) or not isinstance(parameters, dict):
            raise bad_field(field, f"{where}[{index}].call needs a name and parameters")
        call_id = f"call_{before}_{index}"
        function = {"name": name, "arguments": json.dumps(parameters)}
        calls.append({"id": call_id, "type": "function", "function": function})
        answers.append({"role": "tool", "tool_call_id": call_id, "content": json.dumps(outputs)})
    yield {"role": "assistant", "tool_calls": calls}
    yield from answers


def _old_tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tool with `parameter_definitions`."""
    definitions = tool.get("parameter_definitions") or {}
    if not isinstance(definitions, dict) or not all(
        isinstance(one, dict) and isinstance(one.get("type"), str) for one in definitions.values()
    ):
        raise bad_field(
            "tools", f"tools[{index}].parameter_definitions must be objects with a type"
        )
    properties = {}
    for name, one in definitions.items():
        kind = one["type"].partition("[")[0].lower()
        properties[name] = {"type": _TYPES.get(kind, kind)}
        if isinstance(one.get("description"), str):
            properties[name]["description"] = one["description"]
    required = [name for name, one in definitions.items() if one.get("required")]
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {**function, "parameters": parameters}}
