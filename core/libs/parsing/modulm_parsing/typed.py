"""Untyped arguments, converted to JSON by the tool's schema.

A value that can only be a string is streamed; any other is emitted when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from modulm_parsing.json_text import loads, quoted
from modulm_parsing.python_text import literal

__all__ = ["EVERY", "STRING", "Schema", "ValueWriter", "kinds", "parameters_of", "typed"]

Schema = Mapping[str, object]

_MAX_NESTING = 8
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
EVERY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})
#: Start of a value that is not a string, in JSON or Python.
_NO_STRING = frozenset('{["-0123456789tfnTFN')
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def parameters_of(tools: Sequence[Mapping[str, object]], name: str) -> Schema | None:
    """Return the schema of a tool's parameters, in OpenAI's form; None for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return None


def kinds(schema: object, root: Schema | None = None, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows; all of them if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_NESTING:
        return EVERY
    root = schema if root is None else root
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return kinds(_resolved(root, reference), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str) or (isinstance(declared, list) and declared):
        names = {declared} if isinstance(declared, str) else {str(name) for name in declared}
        return frozenset(names & EVERY) or EVERY
    for key in ("enum", "const"):
        if key in schema:
            values = schema[key] if key == "enum" else [schema[key]]
            return frozenset(_kind(value) for value in values) if values else EVERY
    for key in ("anyOf", "oneOf"):
        several = schema.get(key)
        if isinstance(several, list) and several:
            return frozenset().union(*(kinds(each, root, depth + 1) for each in several))
    every = schema.get("allOf")
    if isinstance(every, list) and every:
        return frozenset(EVERY).intersection(*(kinds(each, root, depth + 1) for each in every))
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else EVERY


def _resolved(root: Schema, reference: str) -> object:
    target: object = root
    for part in reference.removeprefix("#/").split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def _kind(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
    return "object" if isinstance(value, Mapping) else "array"


def typed(text: str, allowed: frozenset[str]) -> str:
    """Convert a value's text to JSON of one of the allowed types; a string if none fits."""
    bare = text.strip()
    if allowed == EVERY and bare[:1] in _NO_STRING:
        value = _WORDS.get(bare, bare) if bare != "none" else bare
        if loads(value) is not None or value == "null":
            return value
    word = _WORDS.get(bare.lower())
    if "null" in allowed and word == "null":
        return "null"
    if "boolean" in allowed and word in ("true", "false"):
        return str(word)
    if allowed & {"integer", "number"}:
        number = _number(bare, whole="number" not in allowed)
        if number is not None:
            return number
    if allowed & {"object", "array"} and bare[:1] in ("{", "["):
        structure = _structure(bare)
        if structure is not None and _kind(loads(structure)) in allowed:
            return structure
    if allowed == EVERY and bare[:1] in _NO_STRING:
        structure = literal(bare)
        if structure is not None:
            return structure
    if "string" not in allowed and bare[:1] == '"' and isinstance(loads(bare), str):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _number(text: str, *, whole: bool) -> str | None:
    if not _NUMBER.fullmatch(text):
        text = text.replace("_", "").removeprefix("+")
        if not _NUMBER.fullmatch(text):
            return None
    if whole and not text.lstrip("-").isdigit():
        value = float(text)
        return str(int(value)) if value.is_integer() else text
    return text


def _structure(text: str) -> str | None:
    return text if loads(text) is not None else literal(text)


class ValueWriter:
    """Writes one value as JSON while its text arrives.

    framed: a line feed right after the opening tag and one right before the closing tag are layout.
    verbatim types: see `kinds`.
    """

    def __init__(
        self, emit: Callable[[str], object], allowed: frozenset[str], *, framed: bool = False
    ) -> None:
        self._emit = emit
        self._allowed = allowed
        self._framed = framed
        self._started = not framed
        self._undecided = True  # only white space so far
        self._open = False  # a string is being written
        self._parts: list[str] = []
        self._pending = ""  # a line feed that may be layout

    def feed(self, text: str) -> None:
        """Append text to the value."""
        if not self._started:
            text = text.removeprefix("\n")
            self._started = True
        if self._framed:
            text = self._pending + text
            self._pending = "\n" if text.endswith("\n") else ""
            text = text[: len(text) - len(self._pending)]
        if not text:
            return
        if self._open:
            self._emit(quoted(text))
            return
        self._parts.append(text)
        if self._undecided and self._is_string(text):
            self._open = True
            self._emit('"' + quoted("".join(self._parts)))
            self._parts = []

    def _is_string(self, text: str) -> bool:
        """Whether the value can only be a string."""
        if self._allowed == STRING:
            return True
        head = text.lstrip()[:1]
        self._undecided = head == ""
        return "string" in self._allowed and head != "" and head not in _NO_STRING

    def end(self) -> None:
        """Complete the value."""
        if self._open:
            self._emit('"')
        elif not self._parts and "string" in self._allowed:
            self._emit('""')
        else:
            self._emit(typed("".join(self._parts), self._allowed))
