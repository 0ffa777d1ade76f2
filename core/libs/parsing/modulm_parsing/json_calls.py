"""Formats with JSON calls: objects, lists of objects, and arguments after a header."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from modulm_parsing.json_text import loads, read_json, read_members, read_string
from modulm_parsing.reading import MessageReader, ToolFormat
from modulm_parsing.source import NotACall, Source, Steps, markers
from modulm_parsing.strict import Layout, written

__all__ = ["CallKeys", "HeadedCalls", "JsonCalls", "read_arguments", "read_call"]


@frozen
class CallKeys:
    """Keys of a call object.

    needed: whether an object without arguments is not a call. identity: the key of the call's
    identifier, if the format has one.
    """

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    identity: tuple[str, ...] = ()
    needed: bool = False


class JsonCalls(ToolFormat):
    """Calls as JSON objects after a marker: one, several in a row, or a list.

    If no call follows the marker, it was prose. Without its closing marker, a call is complete with
    its closing brace.
    """

    #: Markers after the calls. White space around them is layout.
    closers: tuple[str, ...] = ()
    keys = CallKeys()
    #: Separator between two objects outside of a list.
    separators = ""
    #: First character of a message that consists only of calls without a marker: "{" or "[".
    bare = ""

    @property
    def words(self) -> tuple[str, ...]:
        return self.closers

    def layout(self) -> Layout | None:
        text = written(self.examples)
        if text is None:
            return None
        start = text.rfind("{", 0, text.index("get_weather"))
        end = text.index("}", text.index("}") + 1) + 1
        begin, call, behind = text[:start], text[start:end], text[end:]
        if begin.rstrip().endswith("["):
            return Layout(call, begin, ", ", behind)
        if self.separators:
            return Layout(call, begin, f"{self.separators[0]} ", behind)
        return Layout(text)

    def bare_heads(self) -> str:
        return self.bare

    def begin(self, message: MessageReader) -> Steps[None]:
        if not self.bare:
            return
        source = message.source
        space = yield from source.space()
        message.content(space)
        if self.openers and (yield from source.comes(markers(*self.openers))):
            return
        if (yield from source.peek()) in self.bare:
            yield from message.attempt(self.read(message, ""), "", message.content)

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        source = message.source
        yield from source.space()
        if (yield from source.peek()) == "[":
            source.advance(source.at + 1)
            yield from self.listed(message)
        else:
            yield from self.in_a_row(message)
        if self.closers:
            yield from message.optional(*self.closers)

    def listed(self, message: MessageReader) -> Steps[None]:
        """Read the calls of a list, after its opening bracket."""
        source = message.source
        before = message.calls
        while True:
            yield from source.space()
            head = yield from source.peek()
            if head == "{":
                if message.calls > before:
                    source.hold()
                yield from self.call(message)
                continue
            if head not in ",]" or message.calls == before:
                raise NotACall
            source.advance(source.at + 1)
            if head == "]":
                return

    def in_a_row(self, message: MessageReader) -> Steps[None]:
        """Read one object and those that follow it."""
        source = message.source
        while True:
            yield from self.call(message)
            yield from source.space()
            if self.separators and (yield from source.peek()) in self.separators:
                source.advance(source.at + 1)
                yield from source.space()
            if (yield from source.peek()) != "{":
                return
            source.hold()

    def call(self, message: MessageReader) -> Steps[None]:
        """Read one object."""
        yield from read_call(message, self.keys)


def read_call(message: MessageReader, keys: CallKeys) -> Steps[None]:
    """Read a call that is one object."""
    members = _Members(keys, message)
    yield from read_members(message.source, members.read)
    members.end()


class _Members:
    """The members of a call object, in any order: name, arguments, optionally an identifier.

    Arguments before the name are buffered. Arguments written as a string that contains an object
    are unwrapped.
    """

    def __init__(self, keys: CallKeys, message: MessageReader) -> None:
        self.keys = keys
        self.message = message
        self.name: str | None = None
        self.identity: str | None = None
        self.early: list[str] = []
        self.has_arguments = False  # whether there were arguments
        self.started = False

    def read(self, key: str) -> Steps[None]:
        """Read the value of one member."""
        source = self.message.source
        if key in self.keys.name and self.name is None:
            self.name = yield from read_string(source)
            if self.has_arguments or not self.keys.needed:
                self.start()
        elif key in self.keys.arguments and not self.has_arguments:
            self.has_arguments = True
            if self.name is not None and (yield from source.peek()) == "{":
                self.start()
                yield from read_json(source, self.message.raw_arguments)
                return
            yield from read_arguments(source, self.early.append)
            if self.name is not None:
                self.start()
        elif key in self.keys.identity and (yield from source.peek()) == '"':
            self.identity = yield from read_string(source)
        else:
            yield from read_json(source, _ignore)

    def start(self) -> None:
        """Emit the call and the arguments buffered before its name."""
        if self.name is None:
            raise NotACall
        if not self.started:
            self.started = True
            self.message.start(self.name, self.identity)
        for part in self.early:
            self.message.raw_arguments(part)
        self.early = []

    def end(self) -> None:
        """Complete the object."""
        if not self.has_arguments:
            if self.keys.needed:
                raise NotACall
            self.start()
        self.message.end_raw()


def _ignore(text: str) -> None:
    pass


def read_arguments(source: Source, emit: Callable[[str], object]) -> Steps[None]:
    """Read an object; one that is written as a string, or null, is unwrapped."""
    if (yield from source.peek()) == "{":
        yield from read_json(source, emit)
        return
    parts: list[str] = []
    yield from read_json(source, parts.append)
    value = loads("".join(parts))
    if value is None or value == "":
        value = "{}"
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        raise NotACall
    emit(value.strip())


class HeadedCalls(ToolFormat):
    """Calls whose name precedes the arguments: `OPEN name SEPARATOR {arguments} CLOSE`.

    group: optional markers around all calls. fences: optional text around the arguments.
    """

    group: tuple[str, str] | None = None
    open: str
    separators: tuple[str, ...]
    close: str
    fences: tuple[str, str] | None = None
    #: Separator between two calls.
    between = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "open" in vars(cls):
            cls.openers = (*(cls.group or ())[:1], cls.open)

    @property
    def words(self) -> tuple[str, ...]:
        return (*(self.group or ()), *self.separators, self.close)

    def layout(self) -> Layout | None:
        text = written(self.examples)
        if text is None:
            return None
        start, end = text.index(self.open), text.rindex(self.close) + len(self.close)
        return Layout(text[start:end], text[:start], self.between, text[end:])

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        source = message.source
        if opener != self.open:
            yield from source.space()
            if not (yield from source.expect(markers(self.open))):
                raise NotACall
        ends = (self.group or ())[1:]
        while True:
            yield from self.call(message)
            marker = yield from message.optional(self.open, *ends)
            if marker != self.open:
                return
            source.unconfirmed = [self.open]

    def call(self, message: MessageReader) -> Steps[None]:
        """Read one call after its opening marker."""
        source = message.source
        name, identity = yield from self.header(message)
        yield from source.space()
        if self.fences is not None and (yield from source.expect(markers(self.fences[0]))):
            yield from source.space()
        if (yield from source.peek()) != "{":
            raise NotACall
        message.start(name, identity)
        yield from read_json(source, message.raw_arguments)
        message.end_raw()
        if self.fences is not None:
            yield from message.optional(self.fences[1])
        yield from message.optional(self.close)

    def header(self, message: MessageReader) -> Steps[tuple[str, str | None]]:
        """Read the name up to the separator, and the identifier if the format has one."""
        name, _ = yield from message.source.through(markers(*self.separators))
        return name.strip(), None
