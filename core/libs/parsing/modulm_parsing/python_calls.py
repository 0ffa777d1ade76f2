"""Formats with Python calls: `[get_weather(city="Oslo", days=3)]`."""

from __future__ import annotations

import re

from modulm_parsing.elements import Element
from modulm_parsing.python_text import read_keywords, read_literal
from modulm_parsing.reading import MessageReader, ToolFormat
from modulm_parsing.source import NotACall, Steps, markers
from modulm_parsing.strict import Function, Layout, python_call, written
from modulm_parsing.tag_calls import ArgumentsWriter

__all__ = ["PythonCalls"]

_NAME = re.compile(r"[\w.-]*")


class PythonCalls(ToolFormat):
    """Calls with literal keyword arguments, in a list or one after another.

    bare: whether a message that starts with a list of calls needs no marker.
    """

    closers: tuple[str, ...] = ()
    bare = False

    @property
    def words(self) -> tuple[str, ...]:
        return self.closers

    def layout(self) -> Layout | None:
        text = written(self.examples)
        if text is None:
            return None
        start, end = text.index("get_weather"), text.rindex(")") + 1
        between = ", " if "[" in text[:start] else "\n"
        return Layout(text[start:end], text[:start], between, text[end:])

    def strict_call(self, call: str, function: Function) -> Element:
        return python_call(call, function)

    def bare_heads(self) -> str:
        return "[" if self.bare else ""

    def begin(self, message: MessageReader) -> Steps[None]:
        if not self.bare:
            return
        message.content((yield from message.source.space()))
        if self.openers and (yield from message.source.comes(markers(*self.openers))):
            return
        if (yield from message.source.peek()) == "[":
            yield from message.attempt(self.read(message, ""), "", message.content)

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        source = message.source
        yield from source.space()
        listed = (yield from source.peek()) == "["
        if listed:
            source.advance(source.at + 1)
        while True:
            yield from source.space()
            yield from self.one(message)
            yield from source.space()
            head = yield from source.peek()
            if head in ",;":
                source.advance(source.at + 1)
                yield from source.space()
                head = yield from source.peek()
            if listed and head == "]":
                source.advance(source.at + 1)
                break
            if not listed and not (head.isalpha() or head == "_"):
                break
            source.hold()
        if self.closers:
            yield from message.optional(*self.closers)

    def one(self, message: MessageReader) -> Steps[None]:
        """Read one call."""
        source = message.source
        name = yield from source.run(_NAME)
        if not name or name[0].isdigit() or (yield from source.peek()) != "(":
            raise NotACall
        source.advance(source.at + 1)
        yield from source.space()
        arguments: list[ArgumentsWriter] = []

        def value(key: str) -> Steps[None]:
            if not arguments:
                arguments.append(ArgumentsWriter(message.arguments, message.start(name)))
            arguments[0].key(key)
            yield from read_literal(source, message.arguments)

        yield from read_keywords(source, value)
        if not arguments:
            arguments.append(ArgumentsWriter(message.arguments, message.start(name)))
        arguments[0].end()
        message.end()
