"""Calls in a format's own spelling, as a grammar that guarantees them.

How a format spells a call is read off its first example, the call of `examples.weather`: what
stands before, between and behind its name and arguments there stands so in every call.
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

#: Most calls of one message where the request sets no bound.
MAX_CALLS = 64
#: The tool and the arguments of the example.
_NAME, _CITY, _TOWN, _DAYS, _COUNT = "get_weather", "city", "Oslo", "days", "3"

_MAX_NESTING = 8
#: Keywords that hold a value to nothing.
_REMARKS = frozenset({
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "examples", "format", "readOnly", "title", "writeOnly",
})  # fmt: skip
#: Parts of a regular expression that match whatever is not named.
_ANYTHING = re.compile(r"(?<!\\)(?:\\\\)*(?:\.|\[\^|\\[SWDPp])")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
#: A Python string between single quotes.
_QUOTED = r"'([^'\\\n]|\\[\\'nrt])*'"
#: How a text begins that cannot be read as a value of another type.
_WORDY = r'[^\s\{\["\-0-9tfnTFN]'


@frozen
class Function:
    """A tool as a request declares it: its name and the schema of its parameters."""

    name: str
    parameters: Schema


@frozen
class Layout:
    """Text before the first call, one call of the example's tool, between two, behind the last."""

    call: str
    begin: str = ""
    between: str = "\n"
    end: str = ""


@frozen
class Part:
    """How one argument may be written: as bare text, as JSON, or either."""

    text: Element | None
    json: Element | None


def written(examples: Iterable[Example]) -> str | None:
    """The text of the example that shows the spelling; None if the first one is another."""
    first = next(iter(examples), None)
    if first is None or first.content is not None or first.reasoning is not None:
        return None
    return first.text if [name for name, _ in first.calls] == [_NAME] else None


def functions_of(context: ParseContext) -> list[Function]:
    """The tools that may be called: all of them, or the one that the request names."""
    choice = context.tool_choice
    named = None
    if not isinstance(choice, str):
        inner = choice.get("function", choice)
        named = inner.get("name") if isinstance(inner, Mapping) else None
    found = []
    for tool in context.tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and named in (None, function.get("name")):
            parameters = function.get("parameters")
            schema = parameters if isinstance(parameters, Mapping) else {}
            found.append(Function(str(function["name"]), schema or {"type": "object"}))
    return found


def calls_of(
    layout: Layout,
    call: Callable[[Function], Element],
    context: ParseContext,
    openers: Sequence[str],
    bare: str = "",
) -> Element | None:
    """What the request's tool choice makes of an answer; None if it makes nothing of it.

    Free to call or not (`auto`), a text without the markers may come before the calls. bare: what
    an answer begins with that is calls without a marker; a text begins with something else then.
    """  # fmt: skip
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
    """One of these, as they are."""
    return {"type": "or", "elements": list(parts)}


def json_call(call: str, function: Function) -> Element:
    """A call whose arguments are JSON."""
    match = re.search(rf'\{{\s*"{_CITY}"', call)
    if match is None:
        raise unwritable(function.name, "the example has no JSON arguments")
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
    """A call whose arguments stand one by one between the markers `begin` and `end`.

    The example's first argument shows how text is written, the second one how JSON is. excludes:
    what the text of an argument must not hold.
    """
    first = call.index(begin)
    second = call.index(begin, first + 1)
    close = call.index(end, first) + len(end)
    last = call.rindex(end) + len(end)
    gap, tail = call[close:second], call[last:]
    shown = _Shown(call[first:close], call[second:last])
    given = []
    for key, schema, needed in properties_of(function):
        part = text_or_json(schema, function, key, excludes)
        given.append((shown.argument(key, part), needed))
    behind = tail.removeprefix(gap).replace(_NAME, function.name)
    if behind == tail and gap:
        arguments = members(given, gap)
    else:
        lines = [(sequence(element, const(gap)), needed) for element, needed in given]
        arguments = sequence(*(each if needed else optional(each) for each, needed in lines))
    head = const(call[:first].replace(_NAME, function.name))
    return sequence(head, arguments, const(behind))


@frozen
class _Shown:
    """The example's arguments: one that is text, one that is JSON."""

    text: str
    json: str

    def argument(self, key: str, part: Part) -> Element:
        ways = []
        if part.text is not None:
            ways.append(self._filled(self.text, _CITY, _TOWN, key, part.text))
        if part.json is not None:
            ways.append(self._filled(self.json, _DAYS, _COUNT, key, part.json))
        return either(*ways)

    def _filled(self, shown: str, name: str, value: str, key: str, element: Element) -> Element:
        head, _, rest = shown.partition(name)
        middle, _, tail = rest.partition(value)
        return sequence(const(head + key + middle), element, const(tail))


def python_call(call: str, function: Function) -> Element:
    """A call with keyword arguments that are literals."""
    name = call[: call.index("(")].replace(_NAME, function.name)
    given = []
    for key, schema, needed in properties_of(function):
        if not _IDENTIFIER.fullmatch(key):
            raise unwritable(function.name, f"{key!r} is no name of a Python argument")
        given.append((sequence(const(f"{key}="), _literal(schema, function)), needed))
    return sequence(const(f"{name}("), members(given, ", "), const(")"))


def _literal(schema: object, function: Function) -> Element:
    """A value as Python writes it; inside of lists and dictionaries JSON is read as well."""
    if isinstance(schema, Mapping) and not schema.keys() & {"enum", "const"}:
        named = kinds(schema, function.parameters)
        if named == {"boolean"}:
            return either(const("True"), const("False"))
        if named == {"null"}:
            return const("None")
        if named == STRING and not schema.keys() - _REMARKS - {"type"}:
            return either(regex(_QUOTED), json_value({"type": "string"}))
    return json_value(with_roots(schema, function))


# Arguments.


def properties_of(function: Function) -> list[tuple[str, object, bool]]:
    """(key, schema, whether it must be there) of each argument, in the order of the schema.

    Raises RequestError where the schema is no plain object.
    """
    schema = resolved(function.parameters, function)
    for word in ("anyOf", "oneOf", "allOf", "if", "not", "dependentRequired", "patternProperties"):
        if word in schema:
            raise unwritable(function.name, f"{word!r} beside the properties")
    properties = schema.get("properties")
    known: dict[str, object] = dict(properties) if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    needed = [str(key) for key in required] if isinstance(required, Sequence) else []
    for key in needed:
        known.setdefault(key, {})
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > len(needed):
        raise unwritable(function.name, "'minProperties' beside optional ones")
    return [(key, known[key], key in needed) for key in known]


def resolved(schema: object, function: Function) -> Schema:
    """The schema that a reference means; an empty one for `true`."""
    for _ in range(_MAX_NESTING):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        found: object = function.parameters
        for part in reference.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = found
    if isinstance(schema, Mapping):
        return schema
    if schema is True:
        return {}
    raise unwritable(function.name, "a schema that nothing fits")


def with_roots(schema: object, function: Function) -> dict[str, object]:
    """The schema of one argument with what its references point to."""
    made = dict(schema) if isinstance(schema, Mapping) else {}
    for word in ("$defs", "definitions"):
        if word in function.parameters:
            made.setdefault(word, function.parameters[word])
    if "$ref" in json.dumps(made) and not made.keys() & {"$defs", "definitions"}:
        raise unwritable(function.name, "a reference to anything but '$defs'")
    return made


def text_or_json(
    schema: object, function: Function, key: str, excludes: Sequence[str], depth: int = 0
) -> Part:
    """How an argument is written where text is bare and all else is JSON."""
    if depth > _MAX_NESTING:
        raise unwritable(function.name, f"the schema of {key!r} is nested too deeply")
    plain = resolved(schema, function)
    listed = plain.get("enum", [plain["const"]] if "const" in plain else None)
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        return _one_of(listed)
    named = kinds(plain, function.parameters)
    if "string" not in named:
        return Part(None, json_value(with_roots(schema, function)))
    if not plain.keys() - _REMARKS:
        return Part(free_text(*excludes), None)
    for word in ("anyOf", "oneOf"):
        several = plain.get(word)
        if isinstance(several, list):
            return _merged(
                [text_or_json(each, function, key, excludes, depth + 1) for each in several], named
            )
    if named == STRING:
        return Part(bounded_text(plain, function, key, excludes), None)
    if named == EVERY:
        raise unwritable(function.name, f"{key!r} needs a type")
    halves = [
        text_or_json({**plain, "type": kind}, function, key, excludes, depth + 1)
        for kind in sorted(named)
    ]
    return _merged(halves, named)


def _one_of(values: Sequence[object]) -> Part:
    texts = [const(value) for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    return Part(either(*texts) if texts else None, json_value({"enum": others}) if others else None)


def _merged(parts: Sequence[Part], named: frozenset[str]) -> Part:
    """Alternatives; a text must not look like a value of another type that is held to something."""
    texts = [part.text for part in parts if part.text is not None]
    others = [part.json for part in parts if part.json is not None]
    if others and not named <= {"string", "null", "boolean"}:
        texts = [_guarded(text) for text in texts]
    return Part(
        either(*texts) if texts else None,
        {"type": "or", "elements": others} if len(others) > 1 else next(iter(others), None),
    )


def _guarded(text: Element) -> Element:
    return sequence(regex(_WORDY), text) if text["type"] == "any_text" else text


def bounded_text(schema: Schema, function: Function, key: str, excludes: Sequence[str]) -> Element:
    """A text with a pattern or of limited length: it does not hold what markers begin with."""
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
    """The whole structural tag."""
    return None if element is None else {"type": "structural_tag", "format": element}
