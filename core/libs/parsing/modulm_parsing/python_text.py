"""Incremental Python literals, converted to JSON. Nothing is evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable

from modulm_parsing.json_text import MAX_DEPTH, loads, quoted
from modulm_parsing.source import NotACall, Source, Steps

__all__ = ["literal", "read_keywords", "read_literal"]

Emit = Callable[[str], object]

_IDENTIFIER = re.compile(r"\w*")
_WORD = re.compile(r"[\w.+-]*")
_PREFIXES = ("r", "R", "u", "U", "b", "B")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false",
          "null": "null"}  # fmt: skip
_INTEGER = re.compile(r"[+-]?\d[\d_]*")
_HEX = re.compile(r"[+-]?0[xXoObB][\da-fA-F_]+")
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
           "\\": "\\", "'": "'", '"': '"', "\n": "", "/": "/"}  # fmt: skip
_WIDTHS = {"x": 2, "u": 4, "U": 8}
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}


def read_keywords(source: Source, emit: Callable[[str], Steps[None]]) -> Steps[None]:
    """Read `(key=value, ...)` after its opening bracket; `emit(key)` reads a value."""
    while True:
        yield from source.space()
        mark = yield from source.peek()
        if mark == ")":
            source.advance(source.at + 1)
            return
        key = yield from source.run(_IDENTIFIER)
        yield from source.space()
        if not key or (yield from source.peek()) not in "=:":
            raise NotACall
        source.advance(source.at + 1)
        yield from source.space()
        yield from emit(key)
        yield from source.space()
        mark = yield from source.peek()
        if mark == ",":
            source.advance(source.at + 1)
        elif mark != ")":
            raise NotACall


def read_literal(source: Source, emit: Emit, depth: int = 0) -> Steps[None]:
    """Read a string, number, name, list, tuple or dictionary. Raises NotACall otherwise."""
    if depth > MAX_DEPTH:
        raise NotACall
    mark = yield from source.peek()
    if mark in "'\"":
        yield from _strings(source, emit)
    elif mark in "[(":
        yield from _list(source, emit, "]" if mark == "[" else ")", depth)
    elif mark == "{":
        yield from _dictionary(source, emit, depth)
    else:
        word = yield from source.run(_WORD)
        if word in _PREFIXES and (yield from source.peek()) in "'\"":
            yield from _strings(source, emit, raw=word in "rR")
        else:
            emit(_scalar(word))


def _scalar(word: str) -> str:
    constant = _WORDS.get(word)
    if constant is not None:
        return constant
    if _HEX.fullmatch(word):
        return str(int(word.replace("_", ""), 0))
    plain = word.replace("_", "").removeprefix("+")
    if _INTEGER.fullmatch(word):
        digits = plain.lstrip("-").lstrip("0") or "0"
        return f"-{digits}" if plain.startswith("-") else digits
    try:
        if word and float(plain) - float(plain) == 0:
            return plain if loads(plain) is not None else repr(float(plain))
    except ValueError:
        pass
    raise NotACall


def _list(source: Source, emit: Emit, closing: str, depth: int) -> Steps[None]:
    source.advance(source.at + 1)
    emit("[")
    separator = ""
    while True:
        yield from source.space()
        if (yield from source.peek()) == closing:
            break
        emit(separator)
        separator = ", "
        yield from read_literal(source, emit, depth + 1)
        yield from source.space()
        mark = yield from source.peek()
        if mark == ",":
            source.advance(source.at + 1)
        elif mark != closing:
            raise NotACall
    source.advance(source.at + 1)
    emit("]")


def _dictionary(source: Source, emit: Emit, depth: int) -> Steps[None]:
    source.advance(source.at + 1)
    emit("{")
    separator = ""
    while True:
        yield from source.space()
        if (yield from source.peek()) == "}":
            break
        emit(separator)
        separator = ", "
        if (yield from source.peek()) not in "'\"":
            raise NotACall
        yield from _strings(source, emit)
        yield from source.space()
        if (yield from source.peek()) != ":":
            raise NotACall
        source.advance(source.at + 1)
        emit(": ")
        yield from source.space()
        yield from read_literal(source, emit, depth + 1)
        yield from source.space()
        mark = yield from source.peek()
        if mark == ",":
            source.advance(source.at + 1)
        elif mark != "}":
            raise NotACall
    source.advance(source.at + 1)
    emit("}")


def _strings(source: Source, emit: Emit, *, raw: bool = False) -> Steps[None]:
    """Read a string; adjacent strings are concatenated."""
    emit('"')
    while True:
        yield from _string(source, emit, raw=raw)
        yield from source.space()
        if (yield from source.over()) or (yield from source.peek()) not in "'\"":
            break
    emit('"')


def _string(source: Source, emit: Emit, *, raw: bool) -> Steps[None]:
    quote = source.advance(source.at + 1)
    if (yield from source.peek()) == quote:
        source.advance(source.at + 1)
        if (yield from source.over()) or (yield from source.peek()) != quote:
            return
        source.advance(source.at + 1)
        yield from _body(source, emit, quote, 3, raw=raw)
    else:
        yield from _body(source, emit, quote, 1, raw=raw)


def _body(source: Source, emit: Emit, quote: str, count: int, *, raw: bool) -> Steps[None]:
    """Read up to `count` consecutive quotes."""
    seen = 0
    plain = _PLAIN[quote]
    while True:
        text, at = source.text, source.at
        if at == len(text):
            yield from source.peek()
            continue
        mark = text[at]
        if mark == quote:
            source.advance(source.at + 1)
            seen += 1
            if seen == count:
                return
            continue
        if seen:
            emit(quoted(quote * seen))
            seen = 0
        if mark == "\\":
            emit((yield from _escape(source, raw=raw)))
            continue
        match = plain.match(text, at)
        if match is not None:
            source.steps += 1 + match.end() - at
            emit(quoted(source.advance(match.end())))


def _escape(source: Source, *, raw: bool) -> Steps[str]:
    """Convert an escape sequence to JSON."""
    source.advance(source.at + 1)
    letter = yield from source.peek()
    source.advance(source.at + 1)
    if raw or letter not in _WIDTHS:
        return quoted("\\" + letter if raw else _SIMPLE.get(letter, "\\" + letter))
    digits = ""
    while len(digits) < _WIDTHS[letter]:
        if (yield from source.peek()) not in "0123456789abcdefABCDEF":
            return quoted(f"\\{letter}{digits}")
        digits += source.advance(source.at + 1)
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000:  # half of a surrogate pair; the other half follows as an escape
        return f"\\u{code:04x}"
    return quoted(chr(code) if code < 0x110000 else f"\\{letter}{digits}")


def literal(text: str) -> str | None:
    """Convert a complete Python literal to JSON; None if it is invalid."""
    source = Source()
    source.push(text)
    source.final = True
    parts: list[str] = []
    try:
        for _ in read_literal(source, parts.append):
            pass
    except NotACall:
        return None
    converted = "".join(parts)
    if source.text[source.at :].strip() or (loads(converted) is None and converted != "null"):
        return None
    return converted
