"""Reading JSON while it arrives (RFC 8259), as readers of a source.

What models get wrong in strings is put right on the way: control characters are written as
escapes, and a backslash that escapes nothing is doubled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

from modulm_parsing.source import NotACall, Source, Steps

__all__ = ["loads", "quoted", "read_json", "read_members", "read_string"]

#: A model that nests deeper than this is looping, not calling a tool.
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
    """The JSON value of `text`, or None if it is not valid JSON (too deep counts as invalid)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def quoted(text: str) -> str:
    """A piece of text as it is written inside a JSON string."""
    return encode_basestring(text)[1:-1]


def read_json(source: Source, emit: Emit) -> Steps[None]:
    """One value of any type. Raises NotACall where it cannot go on as JSON."""
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
    """A string, decoded. Raises NotACall."""
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
    """An object: `member(key)` reads each value. Raises NotACall."""
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
    """An object or an array, its brackets matched."""
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
    """Whether a bracket fits where it stands."""
    if mark in "{[":
        stack.append(mark)
        return len(stack) <= MAX_DEPTH
    return bool(stack) and stack.pop() == _CLOSES[mark]


def _string(source: Source, emit: Emit) -> Steps[None]:
    """The rest of a string, behind its opening quote, with the closing one."""
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
