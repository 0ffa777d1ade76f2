"""What routes answer, as /openapi.json describes it.

An answer is built as a `TypedDict`, which costs nothing when it is made: the type checker holds the
code to it, /openapi.json is made of it, and the tests hold real answers to that.
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

__all__ = ["Described", "ErrorAnswer", "ErrorObject", "Shapes", "gives"]

_PLAIN = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    NoneType: "null",
    None: "null",
}
_FAILURES = {
    "4XX": "The request cannot be answered",
    "5XX": "The server cannot answer",
}


class ErrorObject(TypedDict):
    """What went wrong; `param` is the field of the request that is to blame, where one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """OpenAI's error."""

    error: ErrorObject


def gives(
    answer: Any = None,
    *,
    events: Any = None,
    lines: Any = None,
    content: str | None = None,
    failure: Any = ErrorAnswer,
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route.

    answer: the type of its JSON; events: of what one event of a stream carries; lines: of one line
    of a stream of lines; content: the media type of an answer that is none of these; failure: the
    type of an error, where the API has its own.
    """
    streams: dict[str | None, Any] = {"text/event-stream": events, "application/x-ndjson": lines}
    kinds: dict[str | None, Any] = {"application/json": answer, **streams, content: Any}
    shown = {name: {"schema": kind} for name, kind in kinds.items() if name and kind is not None}
    told = {"application/json": {"schema": failure}}
    return {
        200: {"description": "The answer", **({"content": shown} if shown else {})},
        **{name: {"description": text, "content": told} for name, text in _FAILURES.items()},
    }


class Described(FastAPI):
    """FastAPI with the types of `gives` in its description.

    They are put in when somebody asks, and behind FastAPI, which would make a model of every part:
    half a second in which nothing else had its turn.
    """

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema:
            return self.openapi_schema
        routes = [(route, route.responses) for route in self.routes if isinstance(route, APIRoute)]
        for route, _ in routes:
            route.responses = {}
        try:
            made = super().openapi()
        finally:
            for route, given in routes:
                route.responses = given
        shapes = Shapes()
        for route, given in routes:
            for method in route.methods or () if route.include_in_schema else ():
                _describe(made["paths"][route.path_format][method.lower()], given, shapes)
        made.setdefault("components", {})["schemas"] = shapes.named
        return made


def _describe(
    operation: dict[str, Any], given: Mapping[int | str, Mapping[str, Any]], shapes: Shapes
) -> None:
    """Put answers in the place of those that FastAPI thinks of: a 422 is never sent here."""
    told = {**gives(), **given}
    if 200 not in given:
        told[200] = operation["responses"]["200"]
    operation["responses"] = {
        str(status): {**answer, **_content(answer, shapes)} for status, answer in told.items()
    }


def _content(answer: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    content = {
        media: {**value, "schema": shapes.of(value["schema"])}
        for media, value in answer.get("content", {}).items()
        if "schema" in value
    }
    return {"content": content} if content else {}


@define
class Shapes:
    """JSON schemas of types; `named`: those of objects, which others refer to."""

    named: dict[str, dict[str, Any]] = field(factory=dict)

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type, or what is one already. Raises TypeError for what JSON lacks."""
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
            return self.of(arguments[0])
        if origin in (Union, UnionType):
            return {"anyOf": [self.of(each) for each in arguments]}
        if origin in (list, Sequence):
            return {"type": "array", "items": self.of(arguments[0])}
        if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        raise TypeError(f"{kind!r} has no shape in JSON")

    def _object(self, kind: Any) -> dict[str, Any]:
        made = get_origin(kind) or kind
        name = _name(kind)
        if name not in self.named:
            shape: dict[str, Any] = {"type": "object"}
            self.named[name] = shape
            values = dict(zip(getattr(made, "__parameters__", ()), get_args(kind), strict=False))
            fields = get_type_hints(made, include_extras=True)
            shape["properties"] = {
                key: self.of(_filled(given, values)) for key, given in fields.items()
            }
            # Where annotations are texts, as here, the class takes NotRequired for a part of one.
            shape["required"] = sorted(
                key for key in made.__required_keys__ if get_origin(fields[key]) is not NotRequired
            )
            if made.__doc__:
                shape["description"] = " ".join(made.__doc__.split())
        return {"$ref": f"#/components/schemas/{name}"}


def _name(kind: Any) -> str:
    """Package and class; of what a generic one is of, too."""
    made = get_origin(kind) or kind
    package = made.__module__.partition(".")[0].removeprefix("modulm_route_")
    of = "".join(f".{getattr(given, '__name__', 'Any')}" for given in get_args(kind))
    return f"{package}.{made.__name__}{of}"


def _filled(kind: Any, values: Mapping[Any, Any]) -> Any:
    """A field's type, its type variables replaced."""
    if isinstance(kind, TypeVar):
        return values[kind]
    parameters = getattr(kind, "__parameters__", ())
    return kind[tuple(values[each] for each in parameters)] if parameters else kind
