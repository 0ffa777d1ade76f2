"""Grammars that guarantee calls in a format's own spelling.

The spelling is taken from the format's first example, the call of `examples.weather`: the text
before, between and after its name and arguments is the same in every call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from modulm.contracts.parser import Example, ParseContext
from modulm.errors import RequestError
from modulm_parsing.elements import (
    Element,
    const,
    either,
    free_text,
    json_value,
    members,
    optional,
    regex,
    repeat,
    sequence,
)
from modulm_parsing.typed import EVERY, STRING, Schema, kinds

__all__ = [
    "MAX_CALLS",
    "Function",
    "Layout",
    "Part",
    "as_tag",
    "bounded_text",
    "calls_of",
    "functions_of",
    "json_call",
    "properties_of",
    "python_call",
    "resolved",
    "tagged_call",
    "text_or_json",
    "unwritable",
    "with_roots",
    "written",
]

#: Limit of calls per message if the request sets none.
MAX_CALLS = 64
#: The tool and the arguments of the example.
_NAME, _CITY, _TOWN, _DAYS, _COUNT = "get_weather", "city", "Oslo", "days", "3"

_MAX_NESTING = 8
#: Schema keywords that do not constrain values.
_REMARKS = frozenset({
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "examples", "format", "readOnly", "title", "writeOnly",
})  # fmt: skip
#: Parts of a regular expression that match anything.
_ANYTHING = re.compile(r"(?<!\\)(?:\\\\)*(?:\.|\[\^|\\[SWDPp])")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
#: A Python string in single quotes.
_QUOTED = r"'([^'\\\n]|\\[\\'nrt])*'"
#: Start of text that cannot be read as a value of another type.
_WORDY = r'[^\s\{\["\-0-9tfnTFN]'


@frozen
class Function:
    """A tool of the request: its name and the schema of its parameters."""

    name: str
    parameters: Schema


@frozen
class Layout:
    """Text before the first call, a call of the example's tool, text between and after calls."""

    call: str
    begin: str = ""
    between: str = "\n"
    end: str = ""


@frozen
class Part:
    """How an argument may be written: as bare text, as JSON, or either."""

    text: Element | None
    json: Element | None


def written(examples: Iterable[Example]) -> str | None:
    """Return the text of the first example if it shows the spelling, else None."""
    first = next(iter(examples), None)
    if first is None or first.content is not None or first.reasoning is not None:
        return None
    return first.text if [name for name, _ in first.calls] == [_NAME] else None


def functions_of(context: ParseContext) -> list[Function]:
    """Return the tools that may be called: all, or the one that the request names."""
    choice = context.tool_choice
    chosen = None
    if not isinstance(choice, str):
        inner = choice.get("function", choice)
        chosen = inner.get("name") if isinstance(inner, Mapping) else None
    functions = []
    for tool in context.tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and chosen in (None, function.get("name")):
            parameters = function.get("parameters")
            schema = parameters if isinstance(parameters, Mapping) else {}
            functions.append(Function(str(function["name"]), schema or {"type": "object"}))
    return functions


def calls_of(
    layout: Layout,
    call: Callable[[Function], Element],
    context: ParseContext,
    openers: Sequence[str],
    bare: str = "",
) -> Element | None:
    """Return the constraint for an answer under the request's tool choice; None if there is none.

    With `auto`, text without the markers may precede the calls. bare: first characters of answers
    that are calls without a marker; text then begins with something else.
    """
    functions = functions_of(context)
    if context.tool_choice == "none" or not functions:
        return None
    most = MAX_CALLS if context.max_calls is None else context.max_calls
    if not isinstance(context.tool_choice, str):
        most = 1
    one = either(*(call(function) for function in functions))
    more = repeat(sequence(const(layout.between), one), 0, most - 1)
    calls = sequence(const(layout.begin), one, more, const(layout.end))
    if context.tool_choice != "auto":
        return calls
    text = free_text(*openers)
    if not bare:
        return _either_plain(text, sequence(text, calls))
    first = regex(rf"[^\s{re.escape(bare)}]")
    return optional(_either_plain(calls, sequence(first, text)))


def _either_plain(*parts: Element) -> Element:
    """One of the parts, unchanged."""
    return {"type": "or", "elements": list(parts)}


def json_call(call: str, function: Function) -> Element:
    """Return the element for a call whose arguments are JSON."""
    match = re.search(rf'\{{\s*"{_CITY}"', call)
    if match is None:
        raise unwritable(function.name, "the format's example has no JSON arguments")
    _, end = json.JSONDecoder().raw_decode(call, match.start())
    before, behind = call[: match.start()], call[end:]
    return sequence(
        const(before.replace(_NAME, function.name)),
        json_value(function.parameters),
        const(behind.replace(_NAME, function.name)),
    )


def tagged_call(
    call: str, function: Function, begin: str, end: str, excludes: Sequence[str]
) -> Element:
    """Return the element for a call with arguments one by one between `begin` and `end`.

    The example's first argument shows how text is written, the second how JSON is. excludes:
    strings that the text of an argument must not contain.
    """
    first = call.index(begin)
    second = call.index(begin, first + 1)
    close = call.index(end, first) + len(end)
    last = call.rindex(end) + len(end)
    gap, tail = call[close:second], call[last:]
    example = _ExampleArguments(call[first:close], call[second:last])
    arguments_ = []
    for key, schema, needed in properties_of(function):
        part = text_or_json(schema, function, key, excludes)
        arguments_.append((example.argument(key, part), needed))
    behind = tail.removeprefix(gap).replace(_NAME, function.name)
    if behind == tail and gap:
        arguments = members(arguments_, gap)
    else:
        lines = [(sequence(element, const(gap)), needed) for element, needed in arguments_]
        arguments = sequence(*(each if needed else optional(each) for each, needed in lines))
    head = const(call[:first].replace(_NAME, function.name))
    return sequence(head, arguments, const(behind))


@frozen
class _ExampleArguments:
    """The example's arguments: a text one and a JSON one."""

    text: str
    json: str

    def argument(self, key: str, part: Part) -> Element:
        ways = []
        if part.text is not None:
            ways.append(self._filled(self.text, _CITY, _TOWN, key, part.text))
        if part.json is not None:
            ways.append(self._filled(self.json, _DAYS, _COUNT, key, part.json))
        return either(*ways)

    def _filled(self, template: str, name: str, value: str, key: str, element: Element) -> Element:
        head, _, rest = template.partition(name)
        middle, _, tail = rest.partition(value)
        return sequence(const(head + key + middle), element, const(tail))


def python_call(call: str, function: Function) -> Element:
    """Return the element for a call with literal keyword arguments."""
    name = call[: call.index("(")].replace(_NAME, function.name)
    arguments = []
    for key, schema, needed in properties_of(function):
        if not _IDENTIFIER.fullmatch(key):
            raise unwritable(function.name, f"{key!r} is not a valid Python argument name")
        arguments.append((sequence(const(f"{key}="), _literal(schema, function)), needed))
    return sequence(const(f"{name}("), members(arguments, ", "), const(")"))


def _literal(schema: object, function: Function) -> Element:
    """Return the element for a Python value; inside lists and dictionaries it may also be JSON."""
    if isinstance(schema, Mapping) and not schema.keys() & {"enum", "const"}:
        allowed = kinds(schema, function.parameters)
        if allowed == {"boolean"}:
            return either(const("True"), const("False"))
        if allowed == {"null"}:
            return const("None")
        if allowed == STRING and not schema.keys() - _REMARKS - {"type"}:
            return either(regex(_QUOTED), json_value({"type": "string"}))
    return json_value(with_roots(schema, function))


# Arguments.


def properties_of(function: Function) -> list[tuple[str, object, bool]]:
    """Return (key, schema, whether it is required) of each argument, in schema order.

    Raises RequestError if the schema is not a plain object.
    """
    schema = resolved(function.parameters, function)
    for word in ("anyOf", "oneOf", "allOf", "if", "not", "dependentRequired", "patternProperties"):
        if word in schema:
            raise unwritable(function.name, f"{word!r} in addition to properties")
    properties = schema.get("properties")
    known: dict[str, object] = dict(properties) if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    needed = [str(key) for key in required] if isinstance(required, Sequence) else []
    for key in needed:
        known.setdefault(key, {})
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > len(needed):
        raise unwritable(function.name, "'minProperties' with optional properties")
    return [(key, known[key], key in needed) for key in known]


def resolved(schema: object, function: Function) -> Schema:
    """Return the schema that a reference points to; an empty one for `true`."""
    for _ in range(_MAX_NESTING):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        target: object = function.parameters
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target
    if isinstance(schema, Mapping):
        return schema
    if schema is True:
        return {}
    raise unwritable(function.name, "a schema that nothing can satisfy")


def with_roots(schema: object, function: Function) -> dict[str, object]:
    """Return the schema of one argument with the definitions that its references need."""
    standalone = dict(schema) if isinstance(schema, Mapping) else {}
    for word in ("$defs", "definitions"):
        if word in function.parameters:
            standalone.setdefault(word, function.parameters[word])
    if "$ref" in json.dumps(standalone) and not standalone.keys() & {"$defs", "definitions"}:
        raise unwritable(function.name, "a reference outside of '$defs'")
    return standalone


def text_or_json(
    schema: object, function: Function, key: str, excludes: Sequence[str], depth: int = 0
) -> Part:
    """Return how an argument is written in formats with bare text and JSON for other types."""
    if depth > _MAX_NESTING:
        raise unwritable(function.name, f"the schema of {key!r} is nested too deeply")
    plain = resolved(schema, function)
    listed = plain.get("enum", [plain["const"]] if "const" in plain else None)
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        return _one_of(listed)
    allowed = kinds(plain, function.parameters)
    if "string" not in allowed:
        return Part(None, json_value(with_roots(schema, function)))
    if not plain.keys() - _REMARKS:
        return Part(free_text(*excludes), None)
    for word in ("anyOf", "oneOf"):
        several = plain.get(word)
        if isinstance(several, list):
            return _merged(
                [text_or_json(each, function, key, excludes, depth + 1) for each in several],
                allowed,
            )
    if allowed == STRING:
        return Part(bounded_text(plain, function, key, excludes), None)
    if allowed == EVERY:
        raise unwritable(function.name, f"{key!r} needs a type")
    halves = [
        text_or_json({**plain, "type": kind}, function, key, excludes, depth + 1)
        for kind in sorted(allowed)
    ]
    return _merged(halves, allowed)


def _one_of(values: Sequence[object]) -> Part:
    texts = [const(value) for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    return Part(either(*texts) if texts else None, json_value({"enum": others}) if others else None)


def _merged(parts: Sequence[Part], allowed: frozenset[str]) -> Part:
    """Combine alternatives; text must not look like a constrained value of another type."""
    texts = [part.text for part in parts if part.text is not None]
    others = [part.json for part in parts if part.json is not None]
    if others and not allowed <= {"string", "null", "boolean"}:
        texts = [_guarded(text) for text in texts]
    return Part(
        either(*texts) if texts else None,
        {"type": "or", "elements": others} if len(others) > 1 else next(iter(others), None),
    )


def _guarded(text: Element) -> Element:
    return sequence(regex(_WORDY), text) if text["type"] == "any_text" else text


def bounded_text(schema: Schema, function: Function, key: str, excludes: Sequence[str]) -> Element:
    """Text with a pattern or a length limit, without the first characters of markers."""
    if not schema.keys() & {"pattern", "minLength", "maxLength"}:
        return free_text(*excludes)
    pattern, low, high = (schema.get(word) for word in ("pattern", "minLength", "maxLength"))
    if isinstance(pattern, str):
        bare = pattern.removeprefix("^").removesuffix("$")
        if _ANYTHING.search(bare) or low is not None or high is not None:
            raise unwritable(function.name, f"the pattern of {key!r} may match markers")
        return regex(bare)
    heads = "".join(sorted({re.escape(word.strip()[0]) for word in excludes}))
    return regex(f"[^{heads}]{{{low or 0},{'' if high is None else high}}}")


def unwritable(tool: str, reason: str) -> RequestError:
    return RequestError(
        f"tools: calls of {tool!r} cannot be guaranteed in this model's format: {reason}", "tools"
    )


def as_tag(element: Element | None) -> dict[str, Any] | None:
    """Return the complete structural tag."""
    return None if element is None else {"type": "structural_tag", "format": element}
