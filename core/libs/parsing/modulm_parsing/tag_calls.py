"""Formats with arguments between tags, typed by the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Callable

from modulm_parsing.elements import Element
from modulm_parsing.json_calls import CallKeys, read_call
from modulm_parsing.json_text import quoted
from modulm_parsing.reading import MessageReader, ToolFormat, allowed_kinds
from modulm_parsing.source import Ended, NotACall, Source, Steps, markers
from modulm_parsing.strict import Function, Layout, tagged_call, written
from modulm_parsing.typed import EVERY, STRING, Schema, ValueWriter

__all__ = ["ArgumentsWriter", "PairCalls", "XmlCalls"]

_NAME = re.compile(r"[^\s<>{}\[\]()\"'`,;]*")


class ArgumentsWriter:
    """Writes the arguments of one call as an object, one by one."""

    def __init__(self, emit: Callable[[str], object], schema: Schema | None) -> None:
        self.emit = emit
        self.schema = schema
        self.keys: list[str] = []

    def key(self, key: str) -> None:
        """Write the next argument's name."""
        self.emit(('{"' if not self.keys else ', "') + quoted(key) + '": ')
        self.keys.append(key)

    def value(
        self, key: str, *, framed: bool = False, allowed: frozenset[str] | None = None
    ) -> ValueWriter:
        """A writer for the next argument's value; `allowed` if the format states its type."""
        self.key(key)
        if allowed is None:
            allowed = allowed_kinds(self.schema, key)
        return ValueWriter(self.emit, allowed, framed=framed)

    def end(self) -> None:
        """Close the object."""
        self.emit("}" if self.keys else "{}")


class XmlCalls(ToolFormat):
    """Calls as elements with parameters as child elements.

    outer: optional tags around calls; None if there are none. call, parameter: start of the opening
    tag, end of the name in it, closing tag. attributes: text between the name and the end of a
    parameter's opening tag. A closing tag inside a value is text unless it is followed by what may
    follow an argument.
    """

    outer: tuple[str, str] | None = None
    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    #: Line feeds directly inside a parameter's tags are layout.
    framed = True
    #: A call is valid only inside of `outer`.
    strict_outer = False
    #: One `outer` contains all calls of a message.
    shared_outer = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "call" in vars(cls) or "outer" in vars(cls):
            outer = (cls.outer or ())[:1]
            cls.openers = outer if cls.strict_outer and outer else (*outer, cls.call[0])

    @property
    def words(self) -> tuple[str, ...]:
        return (*(self.outer or ()), self.call[0], self.call[2], self.parameter[2])

    def layout(self) -> Layout | None:
        text = written(self.examples)
        if text is None or self.outer is None or not self.shared_outer:
            return None if text is None else Layout(text)
        start, end = text.index(self.outer[0]) + len(self.outer[0]), text.rindex(self.outer[1])
        inner = text[start:end]
        call = inner.strip()
        space = inner[: inner.index(call)]
        return Layout(call, text[:start] + space, "\n", inner[len(space + call) :] + text[end:])

    def strict_call(self, call: str, function: Function) -> Element:
        begin, _, end = self.parameter
        outer = (self.outer or ())[1:]
        return tagged_call(call, function, begin, end, (end, f"\n{begin}", self.call[2], *outer))

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        source = message.source
        if opener != self.call[0]:
            yield from self.lead(source, opener)
            yield from source.space()
            if not (yield from source.expect(markers(self.call[0]))):
                raise NotACall
        while True:
            closed = yield from self.one(message)
            if closed or (yield from self.between(message)):
                return
            source.unconfirmed = [self.call[0]]

    def lead(self, source: Source, opener: str) -> Steps[None]:
        """Read what stands between an opener and a call's tag."""
        yield from ()

    def between(self, message: MessageReader) -> Steps[bool]:
        """After a call: whether no other call follows."""
        marker = yield from message.optional(self.call[0], *(self.outer or ())[1:])
        return marker != self.call[0]

    def one(self, message: MessageReader) -> Steps[bool]:
        """Read one call after the start of its tag; returns whether `outer` was closed as well."""
        source = message.source
        name = yield from self.called(source)
        call_close, outer_close = self.call[2], (self.outer or ())[1:]
        tags = markers(self.parameter[0], call_close, *outer_close)
        yield from source.space()
        word = yield from source.expect(tags)
        if word is None:
            raise NotACall
        arguments = ArgumentsWriter(message.arguments, message.start(name))
        while True:
            if word is None:
                _, word = yield from source.through(tags)
            if word != self.parameter[0]:
                arguments.end()
                message.end()
                return word != call_close
            word = yield from self.argument(source, arguments)

    def called(self, source: Source) -> Steps[str]:
        """Read a name in a tag. Raises NotACall for invalid tags."""
        name = yield from source.run(_NAME)
        if not name or not (yield from source.expect(markers(self.call[1]))):
            raise NotACall
        return name

    def argument(self, source: Source, arguments: ArgumentsWriter) -> Steps[str | None]:
        """Read one parameter after the start of its tag; returns a foreign tag that ended it."""
        key, _ = yield from source.through(markers(self.parameter[1]))
        allowed = yield from self.allowed(source)
        writer = arguments.value(key, framed=self.framed, allowed=allowed)
        word = yield from self.text(source, writer.feed)
        writer.end()
        return word

    def allowed(self, source: Source) -> Steps[frozenset[str] | None]:
        """Read the rest of a parameter's opening tag; returns the types it states, if any."""
        yield from ()
        return None

    def text(self, source: Source, emit: Callable[[str], None]) -> Steps[str | None]:
        """Read a value and its closing tag; returns the tag that occurred instead, if any."""
        close, call_close = self.parameter[2], self.call[2]
        outer = (self.outer or ())[1:]
        next_one = "\n" + self.parameter[0]
        inside = markers(close, next_one, call_close, *outer)
        after_value = markers(self.parameter[0], call_close, *outer)
        after_call = markers(self.call[0], *(self.outer or ()))
        while True:
            word = yield from source.until(inside, emit)
            if word is None:
                raise Ended
            if word == next_one:
                return self.parameter[0]
            space = yield from source.space()
            if word == close:
                if (yield from source.comes(after_value)) is not None:
                    return None
            elif (yield from source.over()) or (yield from source.comes(after_call)):
                return word
            emit(word + space)


class PairCalls(ToolFormat):
    """Calls as a name and pairs of key and value: `<tool_call>NAME<arg_key>K</arg_key>...`.

    group: optional tags around all calls. after_name: a tag after the name. Calls written as JSON
    objects are read as well.
    """

    group: tuple[str, str] | None = None
    call: tuple[str, str]
    after_name: str | None = None
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    #: Tags around the type of a value, if the format may write it.
    type: tuple[str, str] | None = None
    framed = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "call" in vars(cls):
            cls.openers = (*(cls.group or ())[:1], cls.call[0])

    @property
    def words(self) -> tuple[str, ...]:
        name_tags = () if self.after_name is None else (self.after_name,)
        return (
            *(self.group or ()), self.call[1], *name_tags,
            *self.key, *self.value, *(self.type or ()),
        )  # fmt: skip

    def layout(self) -> Layout | None:
        text = written(self.examples)
        if text is None or self.group is None:
            return None if text is None else Layout(text)
        start, end = text.index(self.call[0]), text.rindex(self.call[1]) + len(self.call[1])
        return Layout(text[start:end], text[:start], "\n", text[end:])

    def strict_call(self, call: str, function: Function) -> Element:
        return tagged_call(call, function, self.key[0], self.value[1], (self.value[1],))

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        source = message.source
        if opener != self.call[0]:
            yield from source.space()
            if not (yield from source.expect(markers(self.call[0]))):
                raise NotACall
        group = (self.group or ())[1:]
        while True:
            yield from self.one(message)
            marker = yield from message.optional(self.call[0], *group)
            if marker != self.call[0]:
                return
            source.unconfirmed = [self.call[0]]

    def one(self, message: MessageReader) -> Steps[None]:
        """Read one call after its opening tag."""
        source = message.source
        yield from source.space()
        if (yield from source.peek()) == "{":
            yield from read_call(message, CallKeys())
            yield from message.optional(self.call[1])
            return
        name = yield from source.run(_NAME)
        if not name:
            raise NotACall
        yield from source.space()
        if self.after_name is not None:
            yield from source.expect(markers(self.after_name))
            yield from source.space()
        word = yield from source.expect(markers(self.key[0], self.call[1]))
        if word is None:
            raise NotACall
        arguments = ArgumentsWriter(message.arguments, message.start(name))
        tags = markers(self.key[0], self.call[1])
        while word == self.key[0]:
            yield from self.pair(source, arguments)
            _, word = yield from source.through(tags)
        arguments.end()
        message.end()

    def pair(self, source: Source, arguments: ArgumentsWriter) -> Steps[None]:
        """Read one pair after the key's opening tag."""
        key, _ = yield from source.through(markers(self.key[1]))
        key = key.strip()
        allowed = None
        tags = (self.value[0],) if self.type is None else (self.value[0], self.type[0])
        _, word = yield from source.through(markers(*tags))
        if self.type is not None and word == self.type[0]:
            kind, _ = yield from source.through(markers(self.type[1]))
            yield from source.through(markers(self.value[0]))
            allowed = STRING if kind.strip() == "string" else EVERY
        writer = arguments.value(key, framed=self.framed, allowed=allowed)
        if (yield from source.until(markers(self.value[1]), writer.feed)) is None:
            raise Ended
        writer.end()
