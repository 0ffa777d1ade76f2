"""Describes the responses of routes for /openapi.json.

A response is built as a `TypedDict`, which costs nothing at run time. The type checker checks the
code against it, /openapi.json is generated from it, and tests check real responses against that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from attrs import define, field
from fastapi import FastAPI
from fastapi.routing import APIRoute

__all__ = ["DescribedApp", "ErrorAnswer", "ErrorObject", "Shapes", "response_docs"]

_PLAIN = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    NoneType: "null",
    None: "null",
}
_FAILURES = {
    "4XX": "The request is invalid",
    "5XX": "The server failed",
}


class ErrorObject(TypedDict):
    """An error. `param` is the request field that caused it, if any."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """OpenAI's error."""

    error: ErrorObject


def response_docs(
    answer: Any = None,
    *,
    events: Any = None,
    lines: Any = None,
    content: str | None = None,
    failure: Any = ErrorAnswer,
) -> dict[int | str, dict[str, Any]]:
    """Build `responses` for a route.

    answer: type of the JSON response. events: type of the data of a server-sent event. lines: type
    of a line of an NDJSON stream. content: media type of any other response. failure: type of an
    error, if the API has its own.
    """
    streams: dict[str | None, Any] = {"text/event-stream": events, "application/x-ndjson": lines}
    kinds: dict[str | None, Any] = {"application/json": answer, **streams, content: Any}
    content_docs = {
        name: {"schema": kind} for name, kind in kinds.items() if name and kind is not None
    }
    failure_docs = {"application/json": {"schema": failure}}
    return {
        200: {"description": "The response", **({"content": content_docs} if content_docs else {})},
        **{
            name: {"description": text, "content": failure_docs} for name, text in _FAILURES.items()
        },
    }


class DescribedApp(FastAPI):
    """FastAPI with the types of `response_docs` and `request_docs` in its OpenAPI schema.

    They are added on request, without FastAPI, which would build a model of every type and block
    the event loop for half a second.
    """

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema:
            return self.openapi_schema
        routes = [(route, route.responses) for route in self.routes if isinstance(route, APIRoute)]
        extras = [route.openapi_extra for route, _ in routes]
        for route, _ in routes:
            route.responses = {}
            route.openapi_extra = route.openapi_extra and _complete(route.openapi_extra)
        try:
            schema = super().openapi()
        finally:
            for (route, responses), extra in zip(routes, extras, strict=True):
                route.responses, route.openapi_extra = responses, extra
        shapes = Shapes()
        for route, responses in routes:
            for method in route.methods or () if route.include_in_schema else ():
                _describe(schema["paths"][route.path_format][method.lower()], responses, shapes)
        schema.setdefault("components", {})["schemas"] = shapes.definitions
        return schema


def _complete(documented: Mapping[str, Any]) -> dict[str, Any]:
    """Replace functions in `openapi_extra` by what they return."""
    return {
        key: _complete(value) if isinstance(value, dict) else value() if callable(value) else value
        for key, value in documented.items()
    }


def _describe(
    operation: dict[str, Any], documented: Mapping[int | str, Mapping[str, Any]], shapes: Shapes
) -> None:
    """Replace FastAPI's responses, which include a 422 that this server never sends."""
    responses = {**response_docs(), **documented}
    if 200 not in documented:
        responses[200] = operation["responses"]["200"]
    operation["responses"] = {
        str(status): {**answer, **_content(answer, shapes)} for status, answer in responses.items()
    }


def _content(answer: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    content = {
        media: {**value, "schema": shapes.schema_of(value["schema"])}
        for media, value in answer.get("content", {}).items()
        if "schema" in value
    }
    return {"content": content} if content else {}


@define
class Shapes:
    """Builds JSON schemas of types. definitions: the schemas of objects, by name."""

    definitions: dict[str, dict[str, Any]] = field(factory=dict)

    def schema_of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type; a dict is one already. Raises TypeError for other types."""
        origin, arguments = get_origin(kind), get_args(kind)
        if isinstance(kind, dict):
            return kind
        if kind is Any:
            return {}
        if kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        if is_typeddict(origin or kind):
            return self._object(kind)
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in (Annotated, NotRequired):
            return self.schema_of(arguments[0])
        if origin in (Union, UnionType):
            return {"anyOf": [self.schema_of(each) for each in arguments]}
        if origin in (list, Sequence):
            return {"type": "array", "items": self.schema_of(arguments[0])}
        if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": self.schema_of(arguments[1])}
        raise TypeError(f"{kind!r} has no JSON schema")

    def _object(self, kind: Any) -> dict[str, Any]:
        origin = get_origin(kind) or kind
        name = _name(kind)
        if name not in self.definitions:
            shape: dict[str, Any] = {"type": "object"}
            self.definitions[name] = shape
            values = dict(zip(getattr(origin, "__parameters__", ()), get_args(kind), strict=False))
            fields = get_type_hints(origin, include_extras=True)
            shape["properties"] = {
                key: self.schema_of(_bound_type(field_type, values))
                for key, field_type in fields.items()
            }
            # With annotations as strings, `__required_keys__` does not recognise NotRequired.
            shape["required"] = sorted(
                key
                for key in origin.__required_keys__
                if get_origin(fields[key]) is not NotRequired
            )
            if origin.__doc__:
                shape["description"] = " ".join(origin.__doc__.split())
        return {"$ref": f"#/components/schemas/{name}"}


def _name(kind: Any) -> str:
    """The definition name of a type: package, class and type arguments."""
    origin = get_origin(kind) or kind
    package = origin.__module__.partition(".")[0].removeprefix("modulm_route_")
    of = "".join(f".{getattr(argument, '__name__', 'Any')}" for argument in get_args(kind))
    return f"{package}.{origin.__name__}{of}"


def _bound_type(kind: Any, values: Mapping[Any, Any]) -> Any:
    """A field's type with its type variables replaced."""
    if isinstance(kind, TypeVar):
        return values[kind]
    parameters = getattr(kind, "__parameters__", ())
    return kind[tuple(values[each] for each in parameters)] if parameters else kind
