"""Help and JSON schema of a driver's options, from its attrs class `Config`.

Help is the field's metadata `help`, or else what the class's docstring says after "name:".
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from attrs import NOTHING, Attribute, Factory, asdict, fields, has, resolve_types

__all__ = ["option_lines", "schema_of"]

_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}


def schema_of(config: type) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a table of options.

    Types that JSON does not have, such as paths, are described as anything.
    """
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_object(config)}


def option_lines(config: type) -> Iterator[str]:
    """Yield a line for each option: name, type, default and help."""
    for name, schema in _object(config)["properties"].items():
        kinds = [each.get("type", "any") for each in schema.get("anyOf", ())]
        kind = schema.get("type") or "/".join(map(str, schema.get("enum", kinds)))
        default = f" = {json.dumps(schema['default'])}" if "default" in schema else ""
        told = schema.get("description", "")
        yield f"{name}: {kind or 'any'}{default}{'  ' if told else ''}{told}"


def _object(config: type) -> dict[str, Any]:
    resolve_types(config)
    attributes = [a for a in fields(config) if a.init]
    properties = {(a.alias or a.name): _option(a, config) for a in attributes}
    return {
        "type": "object",
        "properties": properties,
        "required": [a.alias or a.name for a in attributes if a.default is NOTHING],
        "additionalProperties": False,
    }


def _option(attribute: Attribute[Any], config: type) -> dict[str, Any]:
    schema = _type_schema(attribute.type)
    if told := attribute.metadata.get("help") or _option_help(config, attribute.name):
        schema["description"] = told
    default = attribute.default
    if isinstance(default, Factory) and not default.takes_self:  # type: ignore[arg-type]
        default = default.factory()
    if default is not NOTHING and not isinstance(default, Factory):  # type: ignore[arg-type]
        default = asdict(default) if has(type(default)) else default
        default = default.value if isinstance(default, Enum) else default
        default = list(default) if isinstance(default, tuple | set | frozenset) else default
        if isinstance(default, int | float | str | bool | list | dict | None):
            schema["default"] = default
    for validator in getattr(attribute.validator, "_validators", (attribute.validator,)):
        bound = _BOUNDS.get(getattr(validator, "compare_op", ""))
        if bound:
            schema[bound] = validator.bound
        elif hasattr(validator, "options") and "enum" not in schema:
            schema["enum"] = list(validator.options)
    return schema


def _option_help(config: type, name: str) -> str:
    """What a docstring says of an option: the text after "name:", up to the next option."""
    names = "|".join(a.name for a in fields(config))
    text = " ".join((config.__doc__ or "").split())
    match = re.search(rf"\b{name}: (.*?)(?=(?:[.;] (?:{names}): )|$)", text)
    return match.group(1).rstrip(".") if match else ""


def _type_schema(kind: Any) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [item.value for item in kind]}
    if isinstance(kind, type) and has(kind):
        return _object(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type_schema(each) for each in arguments]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset):
        return {"type": "array", "items": _type_schema(arguments[0])}
    return {}
