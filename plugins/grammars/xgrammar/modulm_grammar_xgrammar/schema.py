"""What xgrammar 0.2 reads in a JSON schema without enforcing it, and what takes it too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["unsupported"]

#: Keywords that are dropped silently: an answer could break them.
_DROPPED = frozenset({
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "then", "uniqueItems",
})  # fmt: skip
#: Keywords that only describe, so that they may stand beside any other.
_REMARKS = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated",
    "description", "discriminator", "example", "examples", "nullable", "readOnly", "title",
    "writeOnly",
})  # fmt: skip
#: Keywords that win over all that stands beside them.
_SOLE = ("$ref", "allOf", "anyOf", "oneOf")
#: Keywords whose values are tables of schemas, by names that are not keywords.
_NAMED = frozenset({"$defs", "definitions", "patternProperties", "properties"})
#: Keywords whose values are data.
_DATA = frozenset({"const", "default", "enum", "example", "examples", "required"})
#: Properties of one object that may be left out: time and memory grow with their square.
_MAX_OPTIONAL = 256


def unsupported(schema: Any) -> str | None:
    """A reason why xgrammar would not hold answers to the schema, or None."""
    for each in _schemas(schema):
        reason = _reason(each)
        if reason is not None:
            return reason
    return None


def _reason(schema: Mapping[str, Any]) -> str | None:
    dropped = sorted(key for key in _DROPPED & schema.keys() if schema[key] is not False)
    if dropped:
        return f"the keyword {dropped[0]!r} is not supported"
    for key in _SOLE:
        beside = sorted(schema.keys() - _REMARKS - {key, "type"})
        if key in schema and beside and beside[0] not in _SOLE[: _SOLE.index(key)]:
            return f"{key!r} beside {beside[0]!r} is not supported"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return "'allOf' with several schemas is not supported"
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength"}:
        return "'pattern' beside 'minLength' or 'maxLength' is not supported"
    properties, required = schema.get("properties"), schema.get("required", ())
    if isinstance(properties, dict) and isinstance(required, list | tuple):
        optional = len(properties) - len(set(map(str, required)) & properties.keys())
        if optional > _MAX_OPTIONAL:
            return f"an object may have at most {_MAX_OPTIONAL} properties that are not required"
    return None


def _schemas(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every schema in a schema, itself included."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, dict):
            continue
        yield node
        for key, inner in node.items():
            if key in _NAMED and isinstance(inner, dict):
                waiting += inner.values()
            elif key not in _DATA:
                waiting.append(inner)
