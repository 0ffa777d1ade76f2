"""Grammars for Gemma's tool calls: values by their schema, strings between quote tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from modulm_parsing.elements import (
    Element,
    const,
    either,
    free_text,
    json_value,
    members,
    regex,
    repeat,
    sequence,
)
from modulm_parsing.strict import (
    Function,
    bounded_text,
    properties_of,
    resolved,
    unwritable,
    with_roots,
)
from modulm_parsing.typed import EVERY, kinds

__all__ = ["call_in_tokens"]

#: Limits of nesting and of items side by side, if the schema sets none.
_DEPTH, _MANY = 2, 16
_MAX_DEPTH = 16
_KEY = r"\w+"


def call_in_tokens(head: str, function: Function, quote: str, close: str) -> Element:
    """`HEADname{key:value,...}CLOSE`."""
    spelling = _Spelling(function, quote)
    arguments = spelling.object(function.parameters, 0)
    return sequence(const(f"{head}{function.name}"), arguments, const(close))


class _Spelling:
    def __init__(self, function: Function, quote: str) -> None:
        self.function = function
        self.quote = quote

    def value(self, schema: object, depth: int) -> Element:
        """A value of a schema."""
        if depth > _MAX_DEPTH:
            raise unwritable(self.function.name, "the schema is nested too deeply")
        plain = resolved(schema, self.function)
        listed = plain.get("enum", [plain["const"]] if "const" in plain else None)
        if isinstance(listed, Sequence) and not isinstance(listed, str):
            return either(*map(self.constant, listed))
        for keyword in ("anyOf", "oneOf"):
            several = plain.get(keyword)
            if isinstance(several, list):
                return either(*(self.value(each, depth + 1) for each in several))
        types = kinds(plain, self.function.parameters)
        if types == EVERY:
            return self.free(_DEPTH)
        return either(*(self.of_kind(kind, plain, depth) for kind in sorted(types)))

    def of_kind(self, kind: str, schema: Mapping[str, object], depth: int) -> Element:
        """A value of one type."""
        if kind == "string":
            text = bounded_text(schema, self.function, "a text", (self.quote,))
            return self.quoted(text)
        if kind == "object":
            return self.object(schema, depth + 1)
        if kind == "array":
            return self.array(schema, depth + 1)
        return json_value(with_roots({**schema, "type": kind}, self.function))

    def constant(self, value: object) -> Element:
        """A constant; lists and objects are not supported."""
        if isinstance(value, str):
            return self.quoted(const(value))
        if isinstance(value, Mapping | Sequence):
            raise unwritable(self.function.name, "a constant is a list or an object")
        return const(json.dumps(value))

    def quoted(self, text: Element) -> Element:
        return sequence(const(self.quote), text, const(self.quote))

    def object(self, schema: Mapping[str, object], depth: int) -> Element:
        """An object; without `properties`, any keys are allowed."""
        properties = properties_of(
            Function(self.function.name, {**self.function.parameters, **schema})
        )
        if depth and "properties" not in schema:
            return self.pairs(self.value(schema.get("additionalProperties", {}), depth))
        pairs = [
            (sequence(const(f"{key}:"), self.value(each, depth)), needed)
            for key, each, needed in properties
        ]
        return sequence(const("{"), members(pairs, ","), const("}"))

    def array(self, schema: Mapping[str, object], depth: int) -> Element:
        """A list."""
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        least = low if isinstance(low, int) else 0
        most = high if isinstance(high, int) else max(least, _MANY)
        return self.items(self.value(schema.get("items", {}), depth), least, most)

    def items(self, item: Element, least: int, most: int) -> Element:
        more = repeat(sequence(const(","), item), max(least - 1, 0), most - 1)
        inner = sequence(item, more) if most else const("")
        return sequence(const("["), inner if least else either(const(""), inner), const("]"))

    def pairs(self, value: Element) -> Element:
        pair = sequence(regex(_KEY), const(":"), value)
        several = sequence(pair, repeat(sequence(const(","), pair), 0, _MANY))
        return sequence(const("{"), either(const(""), several), const("}"))

    def free(self, depth: int) -> Element:
        """Any value, nested at most `depth` levels deep."""
        simple = {"type": ["number", "boolean", "null"]}
        ways = [self.quoted(free_text(self.quote)), json_value(simple)]
        if depth:
            inner = self.free(depth - 1)
            ways += [self.pairs(inner), self.items(inner, 0, _MANY)]
        return either(*ways)
