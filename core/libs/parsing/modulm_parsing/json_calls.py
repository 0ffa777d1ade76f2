"""Formats whose calls are JSON: objects or lists of them, and arguments behind a header."""

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
    """What a call's object calls its members.

    needed: an object without arguments is no call. identity: the member that holds the identifier
    of the call, if the format has one.
    """

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    identity: tuple[str, ...] = ()
    needed: bool = False


class JsonCalls(ToolFormat):
    """Calls as JSON objects behind a marker: one, several in a row, or a list of them.

    What follows the marker must be a call, else it was prose. A call whose closing marker is
    missing is complete with its closing brace.
    """

    #: Markers behind the calls. White space around them is layout.
    closers: tuple[str, ...] = ()
    keys = CallKeys()
    #: Between two objects outside of a list.
    separators = ""
    #: What a message may begin with that is nothing but calls, without a marker: "{" or "[".
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
        """The calls of a list, behind its opening bracket."""
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
        """One object, and those that follow it."""
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
        """One object."""
        yield from read_call(message, self.keys)


def read_call(message: MessageReader, keys: CallKeys) -> Steps[None]:
    """A call that is one object."""
    members = _Members(keys, message)
    yield from read_members(message.source, members.read)
    members.end()


class _Members:
    """The members of one call's object, in any order: a name, arguments, perhaps an identifier.

    Arguments that come before the name wait for it. Arguments written as a string that holds an
    object are unwrapped.
    """

    def __init__(self, keys: CallKeys, message: MessageReader) -> None:
        self.keys = keys
        self.message = message
        self.name: str | None = None
        self.identity: str | None = None
        self.early: list[str] = []
        self.given = False  # there were arguments
        self.told = False

    def read(self, key: str) -> Steps[None]:
        """The value of one member."""
        source = self.message.source
        if key in self.keys.name and self.name is None:
            self.name = yield from read_string(source)
            if self.given or not self.keys.needed:
                self.start()
        elif key in self.keys.arguments and not self.given:
            self.given = True
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
        """Announce the call, and tell what waited for its name."""
        if self.name is None:
            raise NotACall
        if not self.told:
            self.told = True
            self.message.start(self.name, self.identity)
        for part in self.early:
            self.message.raw_arguments(part)
        self.early = []

    def end(self) -> None:
        """The object is whole."""
        if not self.given:
            if self.keys.needed:
                raise NotACall
            self.start()
        self.message.end_raw()


def _ignore(text: str) -> None:
    pass


def read_arguments(source: Source, emit: Callable[[str], object]) -> Steps[None]:
    """An object; one that is written as a string, or null, is unwrapped."""
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
    """Calls whose name stands before the arguments: `OPEN name SEPARATOR {arguments} CLOSE`.

    group: markers around all calls; a call may stand without them. fences: what may be written
    around the arguments.
    """

    group: tuple[str, str] | None = None
    open: str
    separators: tuple[str, ...]
    close: str
    fences: tuple[str, str] | None = None
    #: What stands between two calls.
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
            found = yield from message.optional(self.open, *ends)
            if found != self.open:
                return
            source.held = [self.open]

    def call(self, message: MessageReader) -> Steps[None]:
        """One call, behind its opening marker."""
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
        """The name up to the separator, and the identifier if the format has one."""
        name, _ = yield from message.source.through(markers(*self.separators))
        return name.strip(), None
