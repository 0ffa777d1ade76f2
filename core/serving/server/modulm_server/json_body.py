"""Reads and writes JSON bodies, strictly typed, with errors that name the field.

A request schema is a `msgspec.Struct`. Strings and booleans are not converted to numbers. Unknown
fields are logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.responses import Response

from modulm_server.absent_fields import absent_of
from modulm_server.errors import ApiError, escape
from modulm_server.request_guard import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from starlette.requests import Request

__all__ = [
    "bad_field",
    "body_of",
    "check_counts",
    "convert",
    "decode",
    "joined",
    "json_response",
    "read",
    "read_object",
    "request_docs",
    "to_struct",
]

log = logging.getLogger("modulm_server")

_Body = TypeVar("_Body", bound=msgspec.Struct)
_Result = TypeVar("_Result")
_PATH = re.compile(r" - at `(?:key in )?\$?\.?(.*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_ITEMS = ("items", "additionalProperties")
_DEPTH = 128
_LIMITS = RequestLimits()
#: Bytes from which a body is read in a thread, from which it is in that for long ones, and bytes to
#: scan at a time.
_LARGE, _LONG_BODY, _SLICE = 1 << 16, 1 << 20, 1 << 20
#: Maps every digit to 0 and any other byte to a space, to search for long numbers.
_ZEROS = bytes(48 if 48 <= byte <= 57 else 32 for byte in range(256))
#: The fewest digits of an integer that may exceed 64 bits.
_LONG = b"0" * 19


def bad_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Create a 400 error about a field."""
    return ApiError(400, message, param=param, code=code)


async def read(request: Request, schema: type[_Body], *, typed: bool = True) -> _Body:
    """Read the body of a request. Raises ApiError: 400, or 415 for a content type but JSON.

    The content type matters because browsers let any page send other types to any server. typed:
    False also accepts other types from clients that are no browser, such as curl's default type.
    """
    kinds = [
        header.partition(";")[0].strip().lower()
        for header in request.headers.getlist("content-type")
    ]
    is_json = len(kinds) == 1 and (kinds[0] == "application/json" or kinds[0].endswith("+json"))
    if not is_json and (typed or _is_from_browser(request.headers)):
        raise ApiError(415, "the body must be JSON: send Content-Type: application/json")
    body = await body_of(request)
    decoded = request.scope.get("modulm.json")
    if len(body) < _LARGE:
        return decode(body, schema) if decoded is None else to_struct(decoded, schema)
    work = partial(decode, body) if decoded is None else partial(to_struct, decoded)
    return await asyncio.get_running_loop().run_in_executor(_thread(len(body)), work, schema)


def _is_from_browser(headers: Mapping[str, str]) -> bool:
    """Whether a web page may have sent a POST: browsers name the page, and pages cannot prevent
    it (Fetch standard, 3.2; Fetch Metadata).
    """
    return "origin" in headers or "sec-fetch-site" in headers


async def body_of(request: Request) -> bytes:
    """Return the body of a request, which `request.body()` returns too from then on."""
    if not hasattr(request, "_body"):
        request._body = await joined([part async for part in request.stream()])
    return request._body


async def joined(parts: list[bytes]) -> bytes:
    """Join the parts of a body; in a thread if it is large, since the kernel clears its memory."""
    size = sum(map(len, parts))
    if size < _LARGE:
        return b"".join(parts)
    return await asyncio.get_running_loop().run_in_executor(_thread(size), b"".join, parts)


async def read_object(body: bytes) -> dict[str, Any]:
    """Decode a body before its schema is known. Raises ApiError.

    With the result as `modulm.json` in the scope, `read` does not decode the body again.
    """
    if len(body) < _LARGE:
        return _decode_object(body)
    return await asyncio.get_running_loop().run_in_executor(
        _thread(len(body)), _decode_object, body
    )


async def convert(request: Request, function: Callable[..., _Result], *args: Any) -> _Result:
    """Call a function that reads the decoded body of a request; in a thread if it is large."""
    size = len(await body_of(request))
    if size < _LARGE:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread(size), function, *args)


def _thread(size: int) -> ThreadPoolExecutor:
    """The thread that decodes large bodies, one after the other, off the event loop. Long ones,
    from a megabyte on, have one of their own.
    """
    return _threads()[size >= _LONG_BODY]


@cache
def _threads() -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    names = ("modulm-json", "modulm-long-json")
    return tuple(ThreadPoolExecutor(1, thread_name_prefix=name) for name in names)  # type: ignore[return-value]


def decode(body: bytes, schema: type[_Body]) -> _Body:
    """Decode a body into a schema. Raises ApiError(400)."""
    return to_struct(_decode_object(body), schema)


def _decode_object(body: bytes) -> dict[str, Any]:
    check_counts(body)
    value = _parse(body)
    if _has_long_number(body):
        _check_integers(value)
    if not isinstance(value, dict):
        raise bad_field(None, f"the body must be a JSON object, not {_name(value)}", "invalid_json")
    return value


def to_struct(value: Mapping[str, Any], schema: type[_Body], *, strict: bool = True) -> _Body:
    """Convert a decoded object into a schema. Raises ApiError(400).

    strict: False for forms, whose numbers and booleans are strings.
    """
    try:
        struct = msgspec.convert(value, schema, strict=strict)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), schema) from error
    _report_unknown(value, schema)
    return struct


def request_docs(schema: type[msgspec.Struct]) -> dict[str, Any]:
    """Build `openapi_extra` for a route: the schema of its request body, for /docs.

    A function stands for it until /openapi.json is asked for (`DescribedApp`): the schemas of all
    routes take a tenth of a second, for which a start would wait.
    """
    content = {"application/json": {"schema": partial(_body_schema, schema)}}
    return {"requestBody": {"required": True, "content": content}}


@cache
def _body_schema(schema: type[msgspec.Struct]) -> Any:
    """The JSON schema of a body without references. It is shared, and must not be changed."""
    shape = msgspec.json.schema(schema)
    return _resolved(shape, shape.get("$defs", {}))


def _resolved(value: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace the references in a JSON schema by their definitions."""
    if isinstance(value, list):
        return [_resolved(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _resolved(definitions[value["$ref"].rpartition("/")[2]], definitions)
    return {key: _resolved(item, definitions) for key, item in value.items() if key != "$defs"}


def check_counts(body: bytes) -> None:
    """Raise ApiError(413) for a body that would become too many objects, before it is decoded.

    Counts punctuation anywhere, even inside strings, so the limits are far above what strings of
    a reasonable length contain.
    """
    marks = values = 0
    for start in range(0, len(body), _SLICE):
        within = (start, start + _SLICE)
        marks += sum(body.count(mark, *within) for mark in (b"[", b"{", b":"))
        values += body.count(b",", *within)
    if marks > _LIMITS.nodes or values > _LIMITS.values:
        raise ApiError(
            413,
            f"the body has more than {_LIMITS.nodes} lists and object members, or more than "
            f"{_LIMITS.values} values",
        )


def _has_long_number(body: bytes) -> bool:
    """Whether the body may contain an integer of more than 64 bits."""
    return any(
        _LONG in body[max(0, start - len(_LONG)) : start + _SLICE].translate(_ZEROS)
        for start in range(0, len(body), _SLICE)
    )


def _check_integers(value: Any) -> None:
    """Reject integers of more than 64 bits."""
    for path, number in _numbers(value, "", 0):
        if isinstance(number, int) and not -(2**63) <= number < 2**64:
            raise bad_field(_top(path), f"{path} must be an integer of at most 64 bits")


def _parse(body: bytes) -> Any:
    if not body:
        raise bad_field(None, "the body is empty: send a JSON object", "invalid_json")
    try:
        return msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _second_look(body, error)
    except RecursionError as error:
        raise bad_field(None, "the body is nested too deeply", "invalid_json") from error


def _second_look(body: bytes, first: Exception) -> Any:
    """Raise the error for an invalid body; for NaN or infinity, it names the field."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise bad_field(None, f"the body is not valid JSON: {first}", "invalid_json") from first
    for path, number in _numbers(value, "", 0):
        if isinstance(number, float) and not math.isfinite(number):
            message = f"{path} is {number}, which is not valid JSON: send a finite number"
            raise bad_field(_top(path), message) from first
    raise bad_field(None, f"the body is not valid JSON: {first}", "invalid_json") from first


def _numbers(value: Any, path: str, depth: int) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield path, value
    if depth > _DEPTH:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}".lstrip("."), depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]", depth + 1)


def _invalid(message: str, schema: type[msgspec.Struct]) -> ApiError:
    """Describe an error of msgspec, with the path of the field at first."""
    match = _PATH.search(message)
    path, message = (match[1], message[: match.start()]) if match else ("", message)
    if missing := _MISSING.fullmatch(message):
        path = f"{path}.{missing[1]}".lstrip(".")
        return bad_field(_top(path), f"{path} is required")
    if message.startswith("Invalid enum value"):
        values = ", ".join(map(str, _values_at(_body_schema(schema), path)))
        message = f"must be one of {values}, not {message.removeprefix('Invalid enum value ')}"
        return bad_field(_top(path), f"{path} {message}")
    return bad_field(_top(path) or None, f"{path}: {message}" if path else message)


def _values_at(shape: Any, path: str) -> list[Any]:
    """Return the values that a JSON schema allows at a path such as `a.b[0]` or `a[...]`."""
    shapes = [shape]
    for name in re.findall(r"\w+|\[", path):
        within = [part for shape in shapes for part in _alternatives(shape)]
        if name == "[" or name == "...":
            shapes = [part[key] for part in within for key in _ITEMS if key in part]
        elif not name.isdigit():
            shapes = [p["properties"][name] for p in within if name in p.get("properties", {})]
    found = [part for shape in shapes for part in _alternatives(shape)]
    values = [value for part in found for value in part.get("enum", ()) if value is not None]
    return values + ["true", "false"] * any(part.get("type") == "boolean" for part in found)


def _alternatives(shape: Mapping[str, Any]) -> list[Any]:
    return [shape, *shape.get("anyOf", ())]


def _top(path: str) -> str:
    """The request field that a path belongs to."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


@lru_cache(maxsize=64)
def _fields(schema: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(schema.__struct_encode_fields__)


def _report_unknown(value: Mapping[str, Any], schema: type[msgspec.Struct]) -> None:
    """Log unknown fields. Raises ApiError(400) for a field of vLLM that asks for what is absent."""
    unknown = value.keys() - _fields(schema)
    absent = absent_of(schema)
    for name in sorted(unknown & absent.refused.keys()):
        if value[name]:
            raise bad_field(
                name, f"Not supported yet: {name}. Leave it out: {absent.refused[name]}.",
                "unsupported",
            )  # fmt: skip
    for name in sorted(unknown & absent.no_effect.keys()):
        log.info("Request field %s has no effect: %s", name, absent.no_effect[name])
    unknown -= absent.no_effect.keys() | absent.refused.keys()
    if unknown:
        names = ", ".join(sorted(escape(name, 64) for name in list(unknown)[:8]))
        log.info("Ignored unknown request fields: %s", names)


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Build a JSON response."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")
