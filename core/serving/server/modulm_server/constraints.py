"""What a request wants its answer held to: response formats, structured outputs, forced tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from modulm.contracts.sampling import StructuredOutputs
from modulm_server.json_body import bad_field
from modulm_server.sampling import LIMITS, SamplingFields, StructuredFields, check_schema

__all__ = [
    "allowed_tools",
    "asked",
    "check_tools",
    "forced_tool",
    "from_response_format",
    "from_structured",
    "names_of",
    "only_one",
]

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_TAG_KEYS = ("format", "structures", "triggers", "begin", "end")


def asked(body: SamplingFields) -> dict[str, StructuredOutputs | None]:
    """The constraints that completions and chat requests carry, by field. Raises ApiError(400).

    `guided_json` and its siblings are how older clients of vLLM write `structured_outputs`.
    """
    formats, structured = body.response_format, body.structured_outputs
    found = {
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
            found[f"guided_{kind}"] = from_structured(StructuredFields(**fields), f"guided_{kind}")
    return found


def from_structured(
    given: StructuredFields, where: str = "structured_outputs"
) -> StructuredOutputs | None:
    """vLLM's `structured_outputs`, in the field `where`. Raises ApiError(400)."""
    named = [kind for kind in _KINDS if getattr(given, kind) not in (None, False)]
    if len(named) > 1:
        raise bad_field(where, f"{where}: one constraint at a time, not {', '.join(named)}")
    if not named:
        raise bad_field(where, f"{where}: one of {', '.join(_KINDS)} is needed")
    if isinstance(given.json, str):
        try:
            check_schema(msgspec.json.decode(given.json), where)
        except msgspec.DecodeError as error:
            raise bad_field(where, f"{where}.json: not valid JSON: {error}") from error
    elif given.json is not None:
        check_schema(given.json, where)
    tag = given.structural_tag
    return StructuredOutputs(
        json=given.json,
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
        json_object=given.json_object,
        structural_tag=tag if tag is None or isinstance(tag, str) else _text(tag),
        disable_any_whitespace=given.disable_any_whitespace,
        disable_additional_properties=given.disable_additional_properties,
        whitespace_pattern=given.whitespace_pattern,
    )


def from_response_format(
    given: Mapping[str, Any], where: str = "response_format"
) -> StructuredOutputs | None:
    """OpenAI's response format, in the field `where`; None for plain text. Raises ApiError(400)."""
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")
        if schema is None:
            return StructuredOutputs(json_object=True)
        check_schema(schema, where)
        return StructuredOutputs(json=schema)
    if kind == "json_schema":
        return StructuredOutputs(json=_named_schema(given.get("json_schema"), where))
    if kind == "structural_tag":
        if not any(key in given for key in _TAG_KEYS):
            raise bad_field(where, f"{where}: a structural tag needs format, or structures")
        check_schema(given, where)
        return StructuredOutputs(structural_tag=_text(given))
    raise bad_field(
        where, f"{where}.type: one of text, json_object, json_schema and structural_tag"
    )


def _named_schema(named: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(named, Mapping) or "schema" not in named:
        raise bad_field(where, f"{where}.json_schema: an object with name and schema is needed")
    if not isinstance(named.get("name", ""), str):
        raise bad_field(where, f"{where}.json_schema.name: a string is expected")
    check_schema(named["schema"], where)
    schema: Mapping[str, Any] = named["schema"]
    return schema


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def check_tools(tools: Sequence[Any] | None) -> tuple[dict[str, Any], ...]:
    """Tools in OpenAI's form, checked. Raises ApiError(400) naming `tools`."""
    if not tools:
        return ()
    if len(tools) > LIMITS.tools:
        raise bad_field("tools", f"tools: at most {LIMITS.tools}")
    names: set[str] = set()
    checked = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise bad_field("tools", f"tools[{index}]: a tool of type function is expected")
        name = function.get("name")
        if not isinstance(name, str) or not _is_name(name):
            raise bad_field(
                "tools",
                f"tools[{index}].function.name: 1 to 64 letters, digits, dots, dashes, underscores",
            )
        if name in names:
            raise bad_field("tools", f"tools[{index}].function.name: {name!r} is there twice")
        names.add(name)
        if function.get("parameters") is not None:
            check_schema(function["parameters"], "tools")
        checked.append(dict(tool))
    return tuple(checked)


def _is_name(name: str) -> bool:
    return 0 < len(name) <= 64 and all(c.isalnum() or c in "._-" for c in name) and ".." not in name


def allowed_tools(
    choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[str | Mapping[str, Any], tuple[Mapping[str, Any], ...]]:
    """(the choice among these tools, the tools that may be called).

    OpenAI's choice of type `allowed_tools`, as the chat API nests it and as the responses API has
    it flat, is the choice of its mode among fewer tools; the model still reads of all. Any other
    choice is left as it is. Raises ApiError(400) naming `tool_choice`.
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


def names_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """What the tools are called."""
    return frozenset(tool["function"]["name"] for tool in tools)


def forced_tool(
    choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]], several: bool
) -> StructuredOutputs | None:
    """The grammar that makes the model call: any tool for "required", one by name, else None.

    The text is then plain JSON, which `modulm_parsing` reads back: an array of calls, or the
    arguments of the named tool. Raises ApiError(400) naming `tool_choice`.
    """
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_field("tool_choice", "tool_choice: one of none, auto, required, or a tool")
        if choice == "required" and not tools:
            raise bad_field("tool_choice", "tool_choice: required, but there are no tools")
        return _any_call(tools, several) if choice == "required" else None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool["function"]["name"] == name:
            return StructuredOutputs(json=_parameters(tool))
    raise bad_field("tool_choice", f"tool_choice: there is no tool {str(name)[:64]!r}")


def _any_call(tools: Sequence[Mapping[str, Any]], several: bool) -> StructuredOutputs:
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
    if not several:
        array["maxItems"] = 1
    return StructuredOutputs(json=array)


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] | None = tool["function"].get("parameters")
    return parameters or {"type": "object", "properties": {}}


def only_one(**constraints: StructuredOutputs | None) -> tuple[str, StructuredOutputs] | None:
    """The one constraint that is set, with the field it comes from. Two raise ApiError(400)."""
    present = [(name, value) for name, value in constraints.items() if value is not None]
    if len(present) > 1:
        names = " and ".join(name for name, _ in present)
        raise bad_field(present[1][0], f"{names} cannot be combined: both constrain the answer")
    return present[0] if present else None
