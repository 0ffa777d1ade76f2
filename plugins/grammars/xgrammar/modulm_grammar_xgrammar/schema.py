"""JSON schema features that xgrammar 0.2 ignores, or that it takes too long to compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

__all__ = ["unsupported"]

#: Keywords that xgrammar drops silently: an output could violate them.
_DROPPED = frozenset({
    "$dynamicRef", "$recursiveRef", "contains", "contentEncoding", "contentMediaType",
    "contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "disallow",
    "divisibleBy", "else", "extends", "if", "maxContains", "minContains", "not", "then",
    "uniqueItems",
})  # fmt: skip
#: Annotations, which may appear beside any other keyword.
_REMARKS = frozenset({
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "default", "definitions",
    "deprecated", "description", "discriminator", "example", "examples", "nullable", "readOnly",
    "title", "writeOnly",
})  # fmt: skip
#: Keywords that override everything beside them.
_SOLE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
#: Keywords that are dropped if no `type` says what they apply to.
_TYPED = frozenset({
    "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength", "maxProperties",
    "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern",
})  # fmt: skip
#: Standard formats that are dropped. Other formats are annotations.
_FORMATS = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
#: Keywords whose values are tables of schemas, keyed by property names.
_NAMED = frozenset({"$defs", "definitions", "patternProperties", "properties"})
#: Keywords whose values are data.
_DATA = frozenset({"const", "default", "enum", "example", "examples", "required"})
#: Maximum optional properties of an object: time and memory grow with their square.
_MAX_OPTIONAL = 256
#: Maximum alternatives of a oneOf, which are compared pairwise.
_MAX_EXCLUSIVE = 64
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "array": list, "boolean": bool, "integer": int, "null": type(None), "number": (int, float),
    "object": dict, "string": str,
}  # fmt: skip


def unsupported(schema: Any) -> str | None:
    """Return why xgrammar would not enforce the schema, or None."""
    for each in _schemas(schema):
        reason = _reason(each, schema)
        if reason is not None:
            return reason
    return None


def _reason(schema: Mapping[str, Any], root: Any) -> str | None:
    dropped = sorted(key for key in _DROPPED & schema.keys() if schema[key] is not False)
    if dropped:
        return f"the keyword {dropped[0]!r} is not supported"
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        return f"'$ref' to {reference[:80]!r}, outside this schema, is not supported"
    for key in _SOLE:
        beside = sorted(schema.keys() - _REMARKS - {key, "type"})
        if key in schema and beside and beside[0] not in _SOLE[: _SOLE.index(key)]:
            return f"{key!r} beside {beside[0]!r} is not supported"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return "'allOf' with several schemas is not supported"
    if isinstance(schema.get("oneOf"), list) and not _exclusive(schema["oneOf"], root):
        return "'oneOf' is supported only where a type or a constant tells its schemas apart"
    return _values_reason(schema) or _text_reason(schema) or _object_reason(schema)


def _values_reason(schema: Mapping[str, Any]) -> str | None:
    """Return what is wrong with constants or bounds that conflict with or need a type, or None."""
    kinds = schema.get("type")
    if kinds is None:
        untyped = sorted(_TYPED & schema.keys())
        return f"{untyped[0]!r} without 'type' is not supported" if untyped else None
    if not all(_fits(value, kinds) for value in _values(schema)):
        return "'enum' and 'const' with values that are not of the 'type' are not supported"
    if "multipleOf" in schema and kinds != "integer":
        return "'multipleOf' is supported only beside 'type': 'integer'"
    return None


def _text_reason(schema: Mapping[str, Any]) -> str | None:
    """Return what is wrong with strings that are constrained in two ways at once, or None."""
    if str(schema.get("format")) in _FORMATS:
        return f"the format {schema['format']!r} is not supported"
    for key in ("pattern", "format"):
        beside = sorted(schema.keys() & {"format", "maxLength", "minLength", "pattern"} - {key})
        if key in schema and beside:
            return f"{key!r} beside {beside[0]!r} is not supported"
    return None


def _object_reason(schema: Mapping[str, Any]) -> str | None:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(properties, dict) or not isinstance(required, list | tuple):
        return None
    names = set(map(str, required))
    if names - properties.keys():
        missing = sorted(names - properties.keys())[0][:80]
        return f"'required' names {missing!r}, which 'properties' does not describe"
    optional = len(properties) - len(names)
    if optional > _MAX_OPTIONAL:
        return f"an object may have at most {_MAX_OPTIONAL} properties that are not required"
    return None


def _fits(value: Any, kinds: Any) -> bool:
    """Whether a JSON value is of a type, or of one of several; True for unknown types."""
    if isinstance(kinds, list):
        return any(_fits(value, kind) for kind in kinds)
    types = _TYPES.get(kinds) if isinstance(kinds, str) else None
    if types is None:
        return True
    return isinstance(value, types) and (isinstance(value, bool) == (kinds == "boolean"))


def _exclusive(schemas: Sequence[Any], root: Any) -> bool:
    """Whether no value can match two of these schemas, as far as a quick check can tell."""
    if len(schemas) > _MAX_EXCLUSIVE:
        return False
    resolved = [_resolved(schema, root) for schema in schemas]
    return all(_disjoint(one, other) for one, other in combinations(resolved, 2))


def _disjoint(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    kinds, others = _kinds(one), _kinds(other)
    if kinds and others and not kinds & others:
        return True
    texts, more = _constants(one), _constants(other)
    if texts and more and not texts & more:
        return True
    if kinds != {"object"} or others != {"object"}:
        return False
    return any(
        _apart(one["properties"][name], other["properties"][name])
        for name in _required(one) & _required(other)
    )


def _apart(one: Any, other: Any) -> bool:
    texts, more = _constants(one), _constants(other)
    return bool(texts and more and not texts & more)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names, or those of its constants; empty if it has neither."""
    kinds = schema.get("type", [])
    types = {kinds} if isinstance(kinds, str) else set(map(str, kinds))
    if not types:
        types = {kind for kind in _TYPES for value in _values(schema) if _fits(value, kind)}
    return types | {"number"} if "integer" in types else types


def _constants(schema: Any) -> set[str]:
    """Return the values that a schema of constants allows, as text; empty for other schemas."""
    return set(map(repr, _values(schema))) if isinstance(schema, dict) else set()


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the constants of a schema."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def _required(schema: Mapping[str, Any]) -> set[str]:
    """Return the names of properties that are required and described."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return set()
    return set(map(str, required)) & properties.keys()


def _resolved(schema: Any, root: Any) -> Any:
    """Follow a `$ref` one step; other schemas are returned unchanged."""
    if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
        return schema
    target = root
    for step in schema["$ref"].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target


def _schemas(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every schema inside a schema, itself included."""
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
            elif key == "propertyNames" and isinstance(inner, dict):
                waiting.append({"type": "string", **inner})
            elif key not in _DATA:
                waiting.append(inner)
