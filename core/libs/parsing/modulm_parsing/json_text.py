"""Incremental JSON (RFC 8259), as readers of a source.

Common mistakes of models in strings are corrected: control characters are escaped, and a backslash
that escapes nothing is doubled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

from modulm_parsing.source import NotACall, Source, Steps

__all__ = ["loads", "quoted", "read_json", "read_members", "read_string"]

#: Models that nest deeper than this are looping.
MAX_DEPTH = 128

_BODY = r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+'
_STRING = re.compile(_BODY)
_OUTSIDE = re.compile(rf'(?:[^"{{}}\[\]]++|"{_BODY}")*+')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"[\w.+-]*")
_CLOSES = {"}": "{", "]": "["}
_LITERALS = {"True": "true", "False": "false", "None": "null"}

Emit = Callable[[str], object]


def loads(text: str) -> Any:
    """Parse `text` as JSON; None if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def quoted(text: str) -> str:
    """Escape text for a JSON string."""
    return encode_basestring(text)[1:-1]


def read_json(source: Source, emit: Emit) -> Steps[None]:
    """Read one value of any type. Raises NotACall for invalid JSON."""
    first = yield from source.peek()
    if first in "{[":
        yield from _balanced(source, emit)
    elif first == '"':
        emit(source.advance(source.at + 1))
        yield from _string(source, emit)
    else:
        word = yield from source.run(_SCALAR)
        word = _LITERALS.get(word, word)
        if not word or (loads(word) is None and word != "null"):
            raise NotACall
        emit(word)


def read_string(source: Source) -> Steps[str]:
    """Read and decode a string. Raises NotACall."""
    if (yield from source.peek()) != '"':
        raise NotACall
    parts = [source.advance(source.at + 1)]
    yield from _string(source, parts.append)
    value = loads("".join(parts))
    if not isinstance(value, str):
        raise NotACall
    return value


def read_members(
    source: Source, member: Callable[[str], Steps[None]], *, separators: str = ","
) -> Steps[None]:
    """Read an object: `member(key)` reads each value. Raises NotACall."""
    if (yield from source.peek()) != "{":
        raise NotACall
    source.advance(source.at + 1)
    while True:
        yield from source.space()
        if (yield from source.peek()) == "}":
            break
        key = yield from read_string(source)
        yield from source.space()
        if (yield from source.peek()) != ":":
            raise NotACall
        source.advance(source.at + 1)
        yield from source.space()
        yield from member(key)
        yield from source.space()
        mark = yield from source.peek()
        if mark == "}":
            break
        if mark not in separators:
            raise NotACall
        source.advance(source.at + 1)
    source.advance(source.at + 1)


def _balanced(source: Source, emit: Emit) -> Steps[None]:
    """Read an object or an array with balanced brackets."""
    stack: list[str] = []
    while True:
        yield from source.peek()
        text, at = source.text, source.at
        size = len(text)
        source.steps += 1 + size - at
        in_string = False
        while at < size:
            match = _OUTSIDE.match(text, at)
            at = match.end() if match is not None else at
            if at == size:
                break
            mark = text[at]
            if mark == '"':
                in_string = True
                at += 1
                break
            if not _bracket(stack, mark):
                emit(source.advance(at))
                raise NotACall
            at += 1
            if not stack:
                emit(source.advance(at))
                return
        emit(source.advance(at))
        if in_string:
            yield from _string(source, emit)


def _bracket(stack: list[str], mark: str) -> bool:
    """Whether a bracket is valid at this point."""
    if mark in "{[":
        stack.append(mark)
        return len(stack) <= MAX_DEPTH
    return bool(stack) and stack.pop() == _CLOSES[mark]


def _string(source: Source, emit: Emit) -> Steps[None]:
    """Read the rest of a string after its opening quote, with the closing one."""
    while True:
        text, at = source.text, source.at
        match = _STRING.match(text, at)
        end = match.end() if match is not None else at
        source.steps += 1 + end - at
        if end == len(text):
            if end > at:
                emit(source.advance(end))
            yield from source.peek()
            continue
        mark = text[end]
        if mark == '"':
            emit(source.advance(end + 1))
            return
        if end > at:
            emit(source.advance(end))
        if mark != "\\":
            emit(quoted(source.advance(end + 1)))
        elif _ESCAPE_BEGUN.match(text, end) and not source.final:
            yield
        else:
            source.advance(end + 1)
            emit("\\\\")
