"""Constraints of a request on its answer: response formats, structured outputs, forced tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from modulm.contracts.sampling import StructuredOutputs
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field
from modulm_server.sampling import LIMITS, SamplingFields, StructuredFields, check_schema

__all__ = [
    "allowed_tools",
    "check_tools",
    "forced_tool",
    "from_response_format",
    "from_structured",
    "requested_constraints",
    "single_constraint",
    "tool_names",
]

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_TAG_KEYS = ("format", "structures", "triggers", "begin", "end")


def requested_constraints(body: SamplingFields) -> dict[str, StructuredOutputs | None]:
    """The constraints of a completions or chat request, by field. Raises ApiError(400).

    Older clients of vLLM send `guided_json` and the like instead of `structured_outputs`.
    """
    formats, structured = body.response_format, body.structured_outputs
    constraints = {
        "response_format": None if formats is None else from_response_format(formats),
        "structured_outputs": None if structured is None else from_structured(structured),
    }
    guided = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    for kind, value in guided.items():
        if value is not None:
            fields = {kind: value, "whitespace_pattern": body.guided_whitespace_pattern}
            constraints[f"guided_{kind}"] = from_structured(
                StructuredFields(**fields), f"guided_{kind}"
            )
    return constraints


def from_structured(
    fields: StructuredFields, where: str = "structured_outputs"
) -> StructuredOutputs | None:
    """Read vLLM's `structured_outputs` from the field `where`. Raises ApiError(400)."""
    kinds = [kind for kind in _KINDS if getattr(fields, kind) not in (None, False)]
    if len(kinds) > 1:
        raise bad_field(where, f"{where}: only one constraint is allowed, not {', '.join(kinds)}")
    if not kinds:
        raise bad_field(where, f"{where} needs one of {', '.join(_KINDS)}")
    if isinstance(fields.json, str):
        try:
            check_schema(msgspec.json.decode(fields.json), where)
        except msgspec.DecodeError as error:
            raise bad_field(where, f"{where}.json: not valid JSON: {error}") from error
    elif fields.json is not None:
        check_schema(fields.json, where)
    tag = fields.structural_tag
    return StructuredOutputs(
        json=fields.json,
        regex=fields.regex,
        choice=fields.choice,
        grammar=fields.grammar,
        json_object=fields.json_object,
        structural_tag=tag if tag is None or isinstance(tag, str) else _text(tag),
        disable_any_whitespace=fields.disable_any_whitespace,
        disable_additional_properties=fields.disable_additional_properties,
        whitespace_pattern=fields.whitespace_pattern,
    )


def from_response_format(
    response_format: Mapping[str, Any], where: str = "response_format"
) -> StructuredOutputs | None:
    """Read OpenAI's response format from `where`; None for text. Raises ApiError(400)."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
        if schema is None:
            return StructuredOutputs(json_object=True)
        check_schema(schema, where)
        return StructuredOutputs(json=schema)
    if kind == "json_schema":
        return StructuredOutputs(json=_named_schema(response_format.get("json_schema"), where))
    if kind == "structural_tag":
        if not any(key in response_format for key in _TAG_KEYS):
            raise bad_field(where, f"{where}: a structural tag needs format, or structures")
        check_schema(response_format, where)
        return StructuredOutputs(structural_tag=_text(response_format))
    raise bad_field(where, f"{where}.type must be text, json_object, json_schema or structural_tag")


def _named_schema(json_schema: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(json_schema, Mapping) or "schema" not in json_schema:
        raise bad_field(where, f"{where}.json_schema must be an object with name and schema")
    if not isinstance(json_schema.get("name", ""), str):
        raise bad_field(where, f"{where}.json_schema.name must be a string")
    check_schema(json_schema["schema"], where)
    schema: Mapping[str, Any] = json_schema["schema"]
    return schema


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def check_tools(
    tools: Sequence[Any] | None, parameters: str = "function.parameters"
) -> tuple[dict[str, Any], ...]:
    """Validate tools in OpenAI's form. Raises ApiError(400) naming `tools`.

    parameters: what the API calls their schema, for messages.
    """
    if not tools:
        return ()
    if len(tools) > LIMITS.tools:
        raise bad_field("tools", f"tools: at most {LIMITS.tools} are allowed")
    names: set[str] = set()
    checked = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise bad_field("tools", f"tools[{index}] must be a tool of type function")
        name = function.get("name")
        if not isinstance(name, str) or not _is_name(name):
            raise bad_field(
                "tools",
                f"tools[{index}].function.name: use 1 to 64 letters, digits, '.', '-' or '_'",
            )
        if name in names:
            raise bad_field("tools", f"tools[{index}].function.name: {name!r} occurs twice")
        names.add(name)
        if function.get("parameters") is not None:
            _check_parameters(function["parameters"], f"tools[{index}].{parameters}")
        checked.append(dict(tool))
    return tuple(checked)


def _check_parameters(schema: Any, where: str) -> None:
    """Check that a schema can describe the arguments of a call, which are an object."""
    try:
        check_schema(schema, "tools")
    except ApiError as error:
        raise bad_field("tools", error.message.replace("tools", where, 1)) from None
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        shown = _text(kind)[:64]
        raise bad_field(
            "tools",
            f'{where}.type must be "object", not {shown}: the arguments of a call have names',
        )
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not all(
        isinstance(value, Mapping | bool) for value in properties.values()
    ):
        raise bad_field("tools", f"{where}.properties must be an object of JSON schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_field("tools", f"{where}.required must be a list of names")


def _is_name(name: str) -> bool:
    return 0 < len(name) <= 64 and all(c.isalnum() or c in "._-" for c in name) and ".." not in name


def allowed_tools(
    choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[str | Mapping[str, Any], tuple[Mapping[str, Any], ...]]:
    """Resolve OpenAI's choice of type `allowed_tools` into (tool choice, callable tools).

    The choice becomes its mode, among the listed tools; the prompt still describes all tools.
    Accepts the nested form of the chat API and the flat one of the responses API. Any other choice
    is returned unchanged, with all tools. Raises ApiError(400) naming `tool_choice`.
    """
    if isinstance(choice, str) or choice.get("type") != "allowed_tools":
        return choice, tuple(tools)
    inner = choice.get("allowed_tools", choice)
    listed = inner.get("tools") if isinstance(inner, Mapping) else None
    if not isinstance(listed, list) or not listed or inner.get("mode") not in ("auto", "required"):
        raise bad_field(
            "tool_choice", "tool_choice: allowed_tools needs mode (auto or required) and tools"
        )
    known = {tool["function"]["name"]: tool for tool in tools}
    allowed = {}
    for entry in listed:
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in known:
            raise bad_field("tool_choice", f"tool_choice: there is no tool {str(name)[:64]!r}")
        allowed[name] = known[name]
    mode: str = inner["mode"]
    return mode, tuple(allowed.values())


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of the tools."""
    return frozenset(tool["function"]["name"] for tool in tools)


def forced_tool(
    choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]], parallel: bool
) -> StructuredOutputs | None:
    """The JSON grammar that forces a call: of any tool for "required", of a named tool, else None.

    The output is an array of calls, or the arguments of the named tool, which `modulm_parsing`
    reads back. Raises ApiError(400) naming `tool_choice`.
    """
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_field("tool_choice", "tool_choice must be none, auto, required, or a tool")
        if choice == "required" and not tools:
            raise bad_field("tool_choice", "tool_choice is required, but there are no tools")
        return _any_call(tools, parallel) if choice == "required" else None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool["function"]["name"] == name:
            return StructuredOutputs(json=_parameters(tool))
    raise bad_field("tool_choice", f"tool_choice: there is no tool {str(name)[:64]!r}")


def _any_call(tools: Sequence[Mapping[str, Any]], parallel: bool) -> StructuredOutputs:
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool["function"]["name"]]},
                "parameters": _parameters(tool),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        array["maxItems"] = 1
    return StructuredOutputs(json=array)


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] | None = tool["function"].get("parameters")
    return parameters or {"type": "object", "properties": {}}


def single_constraint(
    **constraints: StructuredOutputs | None,
) -> tuple[str, StructuredOutputs] | None:
    """The only constraint that is set, as (field, constraint). Raises ApiError(400) for two."""
    present = [(name, value) for name, value in constraints.items() if value is not None]
    if len(present) > 1:
        names = " and ".join(name for name, _ in present)
        raise bad_field(present[1][0], f"{names} cannot be combined: both constrain the answer")
    return present[0] if present else None
