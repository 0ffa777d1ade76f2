"""What the front end of several models reads of a request's body, before its model reads it all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import define

from modulm_server.errors import ApiError, ClientGone
from modulm_server.json_body import joined, read_object

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

__all__ = ["Replay", "RequestFields", "read_body", "read_fields"]

#: Maximum bytes of a form's field.
_VALUE = 1024


@define
class RequestFields:
    """The fields that decide which model answers, and how its client waits for it."""

    model: Any = msgspec.UNSET
    stream: Any = False
    keep_alive: Any = msgspec.UNSET


@define(eq=False)
class Replay:
    """Receives a body that was already read, then what follows it."""

    body: bytes
    receive: Receive
    _sent: bool = False

    async def __call__(self) -> Message:
        if self._sent:
            return await self.receive()
        self._sent = True
        return {"type": "http.request", "body": self.body, "more_body": False}


async def read_fields(scope: Scope, body: bytes) -> RequestFields | None:
    """Read the fields of a body, and keep the decoded JSON for its route, as `modulm.json`.

    None if it is no JSON object and no form: the answer is an error, whichever model it is for.
    """
    if not body:
        return RequestFields()
    kind = _content_type(scope)
    if kind[:19].lower() == b"multipart/form-data":
        return await asyncio.to_thread(_form_fields, kind, body)
    if b"json" not in kind.lower():
        return None
    try:
        value = scope["modulm.json"] = await read_object(body)
    except ApiError:
        return None
    get = value.get
    return RequestFields(
        get("model", msgspec.UNSET), get("stream", False), get("keep_alive", msgspec.UNSET)
    )


async def read_body(receive: Receive) -> bytes:
    """Read a whole body. Raises ClientGone."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    if not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        return body
    parts = [message.get("body", b"")]
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
    return await joined(parts)


def _content_type(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind: bytes = value
            return kind
    return b""


def _form_fields(content_type: bytes, body: bytes) -> RequestFields | None:
    """Read the fields of a form; files are skipped."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    _, options = parse_options_header(content_type)
    reader = _FormReader(parse_options_header)
    try:
        parser = MultipartParser(options[b"boundary"], reader.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except (FormParserError, KeyError, ValueError):
        return None
    values = reader.values
    fields = RequestFields(stream=values.get(b"stream", b"").lower() in (b"true", b"1"))
    if b"model" in values:
        fields.model = values[b"model"].decode("utf-8", "replace")
    return fields


class _FormReader:
    """Collects the short fields of a form that matter here."""

    def __init__(self, parse_options: Any) -> None:
        self.values: dict[bytes, bytes] = {}
        self._parse_options = parse_options
        self._header = b""
        self._value = b""
        self._field: bytes | None = None

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._data,
            "on_header_begin": self._header_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
        }

    def _begin(self) -> None:
        self._field = None

    def _header_begin(self) -> None:
        self._header, self._value = b"", b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = self._parse_options(self._value)
            name = options.get(b"name")
            self._field = name if name in (b"model", b"stream") else None
            if self._field is not None:
                self.values[self._field] = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            value = self.values[self._field] + data[start:end]
            self.values[self._field] = value[:_VALUE]
