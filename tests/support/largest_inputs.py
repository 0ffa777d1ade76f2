"""The largest input of every route of an application, from its own description where it has one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen
from fastapi import FastAPI

__all__ = ["Input", "inputs_of"]

#: Characters of a long text, and list entries of a body: what guards of bodies let through.
CHARACTERS, ENTRIES = 4 << 20, 400_000
#: Characters of a parameter in a path, of which the limit of headers leaves room for.
NAME = 60_000
_PARAMETER = re.compile(r"{[^}]*}")


@frozen
class Input:
    """A request. kind: "json" or "form", None without a body."""

    method: str
    path: str
    kind: str | None = None
    body: Any = None

    @property
    def url(self) -> str:
        count = len(_PARAMETER.findall(self.path))
        return _PARAMETER.sub("x" * (NAME // max(count, 1)), self.path)

    @property
    def arguments(self) -> dict[str, Any]:
        """What httpx sends."""
        if self.kind == "form":
            files = {name: ("x", value) for name, value in self.body.items()}
            return {"files": files}
        if self.kind is None:
            return {}
        headers = {"Content-Type": "application/json"}
        return {"content": json.dumps(self.body).encode(), "headers": headers}


class _Filler:
    """Values of a schema. lists: among how many lists the entries of a body are divided."""

    def __init__(self, schemas: Mapping[str, Any], lists: int) -> None:
        self._schemas, self._entries = schemas, ENTRIES // max(lists, 1)

    def resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                options = [self.resolve(one) for one in schema[key]]
                return next((o for o in options if o.get("type") == "array"), options[0])
        return schema

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        schema = self.resolve(schema)
        if "enum" in schema or "const" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        match schema.get("type"):
            case "string":
                most = schema.get("maxLength", CHARACTERS if depth < 2 else 3)
                return ("a b " * (most // 4 + 1))[:most]
            case "array":
                count = self._entries if depth < 2 else 1
                entry = self.value(schema.get("items", {}), depth + 2)
                size = len(entry) if isinstance(entry, dict | list) else 1
                return [entry] * min(schema.get("maxItems", count), max(1, count // (size + 1)))
            case "object":
                required = schema.get("required", ())
                table = {
                    name: self.value(one, depth + 1)
                    for name, one in schema.get("properties", {}).items()
                    if name in required or depth < 1
                }
                return table or {f"k{number}": "v" for number in range(16 if depth else 1000)}
            case "boolean":
                return False
            case "integer" | "number":
                return max(1, schema.get("minimum", 1))
        return "a"


#: For routes without a description.
ANYTHING = {"model": "M", "prompt": "a b " * (CHARACTERS // 4), "input": [1] * ENTRIES}


def inputs_of(api: FastAPI) -> list[Input]:
    """The largest input of each operation. Sockets are not among them."""
    described = list(_described(api.openapi()))
    known = {(one.method.upper(), one.path) for one in described}
    others = [
        Input(method, path, "json" if method == "POST" else None, ANYTHING)
        for route in api.router.routes
        for path in [getattr(route, "path", "")]
        for method in sorted(getattr(route, "methods", None) or ())
        if (method, getattr(route, "path_format", path)) not in known
    ]
    return described + others


def _described(document: Mapping[str, Any]) -> Iterator[Input]:
    """The largest input of each operation of an OpenAPI document."""
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if "multipart/form-data" in content:
                schema = _Filler(schemas, 1).resolve(content["multipart/form-data"]["schema"])
                body = dict.fromkeys(schema.get("properties", {}), b"a b " * (4 << 20))
                yield Input(method, path, "form", dict(list(body.items())[:3]))
            elif "application/json" in content:
                schema = _Filler(schemas, 1).resolve(content["application/json"]["schema"])
                filler = _Filler(schemas, 1)
                lists = [
                    one for one in schema.get("properties", {}).values()
                    if filler.resolve(one).get("type") == "array"
                ]  # fmt: skip
                body = _Filler(schemas, len(lists)).value(schema)
                if isinstance(body, dict):
                    body = {**body, **({"model": "M"} if "model" in body else {})}
                yield Input(method, path, "json", body)
            else:
                yield Input(method, path)
