"""Reads a message as a whole: content, reasoning and calls in one grammar.

A format declares the markers that open a region and reads what is inside. `MessageReader` reads the
content between regions and turns everything into events. A reasoning format and a tool format share
one `MessageReader`, so that reasoning may occur between calls and both see the same token ids.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from modulm.contracts.parser import (
    Content,
    Event,
    ParseContext,
    Parser,
    Reasoning,
    ReasoningParser,
    ToolArguments,
    ToolEnd,
    ToolParser,
    ToolStart,
)
from modulm_parsing.json_text import loads
from modulm_parsing.source import Ended, NotACall, Source, Steps, markers
from modulm_parsing.strict import Function, Layout, as_tag, calls_of, json_call
from modulm_parsing.typed import Schema, ValueWriter, kinds, parameters_of

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_parsing.elements import Element

__all__ = ["Edit", "Format", "MessageReader", "ReasoningFormat", "ToolFormat", "allowed_kinds"]


class MessageReader:
    """Reads one message with the formats of its parsers and emits events.

    White space around a call is layout; between two pieces of content, the white space before the
    call is kept.
    """

    def __init__(
        self,
        context: ParseContext,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        self.context = context
        self.tools = tools
        self.thoughts = reasoning
        self.calls = 0
        self.thinking = reasoning is not None and reasoning.opened
        self.thought = False  # there was reasoning
        self._has_content = False  # there was content
        self.at_start = True  # only white space since the start of the answer or the last call
        self.source = Source()
        self._space: list[str] = []
        self._events: list[Event] = []
        self._kind: type[Content | Reasoning | ToolArguments] = Content
        self._parts: list[str] = []
        self._json: list[str] = []  # the current call's arguments as written by the model
        self._owners: dict[str, Format] = {}
        self._framing = frozenset(
            word
            for format_ in (tools, reasoning)
            if format_ is not None
            for word in format_.framing
        )
        for format_ in (tools, reasoning):
            if format_ is not None:
                format_markers = (*format_.framing, *format_.openers)
                self._owners.update(dict.fromkeys(format_markers, format_))
        self._know_tokens()
        self._openers = markers(*self._owners)
        self._edits: dict[type, Edit] = {}
        if reasoning is not None and reasoning.edit is not None:
            self._edits = {Content: reasoning.edit(), Reasoning: reasoning.edit()}
        self._steps = self._read()

    def _know_tokens(self) -> None:
        tokenizer = self.context.tokenizer
        if tokenizer is None or _forced(self.context):
            return
        all_markers = {
            w for f in (self.tools, self.thoughts) if f is not None for w in f.every_word()
        }
        self.source = Source(_special(tokenizer, frozenset(all_markers)))
        self.source.decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def reasoning_end(self) -> str | None:
        """See `ReasoningParser.reasoning_end`."""
        if self.thoughts is None or not self.thinking or self.source.unconfirmed is not None:
            return None
        return self.thoughts.ending(self)

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        """Parse more text and its token ids; return the events that are certain."""
        self.source.push(text, ids)
        next(self._steps, None)
        return self._drain()

    def finish(self) -> list[Event]:
        """End of the text; return the remaining events."""
        self.source.final = True
        next(self._steps, None)
        return self._drain()

    def _drain(self) -> list[Event]:
        if self._parts:
            self._flush()
        events, self._events = self._events, []
        return events

    # Called by formats.

    def content(self, text: str) -> None:
        """Emit text for the user."""
        if self.at_start and (self.calls or self.thought):
            text = text.lstrip()
        if not text:
            return
        stripped = text.rstrip()
        tail = text[len(stripped) :]
        if stripped:
            self.at_start = False
            self._has_content = True
            if self._space:
                stripped = "".join([*self._space, stripped])
                self._space.clear()
            self._put(Content, stripped)
        if tail:
            self._space.append(tail)

    def verbatim(self, text: str) -> None:
        """Emit text for the user, preserving all white space."""
        if text:
            self.at_start = self.at_start and text.isspace()
            self._put(Content, text)

    def reasoning(self, text: str) -> None:
        """Emit reasoning."""
        self.thought = True
        if text:
            self._put(Reasoning, text)

    def start(self, name: str, identity: str | None = None) -> Schema | None:
        """Start a call, which includes the held text; return its parameters' schema, if known.

        Raises NotACall for an invalid name.
        """
        tools = self.context.tools
        schema = parameters_of(tools, name)
        unknown = schema is None and tools and self.tools is not None and self.tools.known_only
        if not name or name.isspace() or unknown:
            raise NotACall
        self.source.unconfirmed = None
        self.thinking = False
        self.at_start = True
        if not self._has_content:
            self._space.clear()
        self._settle()
        if identity is None and self.tools is not None:
            identity = self.tools.identity(self.calls)
        self._events.append(ToolStart(self.calls, _encodable(name), identity))
        self.calls += 1
        self._json = []
        return schema

    def layout(self) -> None:
        """Discard the white space so far and the white space that follows."""
        self._space.clear()
        self.at_start = True

    def arguments(self, text: str) -> None:
        """Emit arguments as JSON written by a reader."""
        if text:
            self._put(ToolArguments, text)

    def raw_arguments(self, text: str) -> None:
        """Emit arguments as the model wrote them; `end_raw` checks them."""
        self._json.append(text)
        self._put(ToolArguments, text)

    def end(self) -> None:
        """Complete the call."""
        self._flush()
        self._events.append(ToolEnd(self.calls - 1))

    def end_raw(self) -> None:
        """Complete the call if its arguments are an object; `{}` if there are none."""
        if not self._json:
            self.arguments("{}")
        elif not isinstance(loads("".join(self._json)), dict):
            return
        self.end()

    def _put(self, kind: type[Content | Reasoning | ToolArguments], text: str) -> None:
        if kind is not self._kind:
            self._settle()
            self._kind = kind
        if self._edits and kind in self._edits:
            text = self._edits[kind].feed(text)
            if not text:
                return
        self._parts.append(text)

    def _settle(self) -> None:
        """Emit held text before events of another kind."""
        if self._edits and self._kind in self._edits:
            rest = self._edits[self._kind].finish()
            if rest:
                self._parts.append(rest)
        if self._parts:
            self._flush()

    def _flush(self) -> None:
        if not self._parts:
            return
        parts = self._parts
        text = parts[0] if len(parts) == 1 else "".join(parts)
        self._parts = []
        if self._kind is ToolArguments:
            self._events.append(ToolArguments(self.calls - 1, text))
        else:
            self._events.append(Content(text) if self._kind is Content else Reasoning(text))

    # Reading.

    def _read(self) -> Steps[None]:
        for format_ in (self.thoughts, self.tools):
            if format_ is not None:
                with suppress(Ended):
                    yield from format_.begin(self)
        yield from self.body()
        if self._space and not self.calls:
            self.verbatim("".join(self._space))
        self._settle()

    def body(self) -> Steps[None]:
        """Read content and the regions in it, to the end."""
        emit = self.content
        if self.tools is not None and self.tools.keeps_space:
            emit = self.verbatim
        while True:
            opener = yield from self.source.until(self._openers, emit, quotes=True)
            if opener is None:
                return
            owner = self._owners[opener]
            if opener in self._framing:
                self.layout()
                yield from self.source.space()
                continue
            yield from self.attempt(owner.read(self, opener), opener, emit)

    def attempt(self, steps: Steps[None], opener: str, prose: Callable[[str], None]) -> Steps[bool]:
        """Read a region; if it turns out not to be one, pass its text to `prose`.

        Returns whether it was a region.
        """
        source = self.source
        source.unconfirmed = [opener]
        with suppress(NotACall):
            yield from steps
        region, source.unconfirmed = source.unconfirmed, None
        if region:
            prose("".join(region))
        return not region

    def optional(self, *candidates: str) -> Steps[str | None]:
        """After a call: read one of the markers, if present, and the white space before it.

        Raises Ended.
        """
        space = yield from self.source.space()
        marker = yield from self.source.expect(markers(*candidates))
        if marker is None and self.tools is not None and self.tools.keeps_space:
            self.verbatim(space)
        return marker

    def value(self, schema: Schema | None, key: str, *, framed: bool = False) -> ValueWriter:
        """Return a writer for the argument `key` of the current call."""
        return ValueWriter(self.arguments, allowed_kinds(schema, key), framed=framed)


def allowed_kinds(schema: Schema | None, key: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have."""
    properties = schema.get("properties") if schema is not None else None
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    return kinds(declared, schema)


class Edit(Protocol):
    """Transforms text before it is emitted."""

    def feed(self, text: str) -> str:
        """Transform more text; return what is certain."""

    def finish(self) -> str:
        """End of the text; return the rest."""


class Format(Parser):
    """Base class of formats of reasoning or calls, which are also parsers."""

    def __init__(self, context: ParseContext) -> None:
        super().__init__(context)
        tokenizer = context.tokenizer
        if tokenizer is not None:
            special = set(tokenizer.special_tokens)
            self.special_tokens = tuple(word for word in self.every_word() if word in special)
        self._reader: MessageReader | None = None

    #: The reader of this format's messages; two formats with one reader form one grammar.
    reader: type[MessageReader] = MessageReader
    #: Markers that open a region anywhere in content.
    openers: tuple[str, ...] = ()

    #: Markers in content that are dropped without opening anything.
    framing: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Further markers that may be single tokens of a vocabulary."""
        return ()

    def every_word(self) -> tuple[str, ...]:
        """All markers that may be single tokens of a vocabulary."""
        return tuple(dict.fromkeys((*self.openers, *self.framing, *self.words)))

    @abstractmethod
    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """Read a region after its opener. Raises NotACall if it is not one."""

    def begin(self, message: MessageReader) -> Steps[None]:
        """Read what may occur at the beginning only."""
        yield from ()

    @abstractmethod
    def alone(self) -> MessageReader:
        """A reader for messages with this format only."""

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        if self._reader is None:
            self._reader = self.alone()
        return self._reader.feed(text, ids)

    def finish(self) -> list[Event]:
        if self._reader is None:
            self._reader = self.alone()
        return self._reader.finish()

    @property
    def steps(self) -> int:
        """Number of characters examined so far, with repetitions."""
        return 0 if self._reader is None else self._reader.source.steps


class ToolFormat(Format, ToolParser):
    """A format of calls."""

    #: Whether white space next to calls is content.
    keeps_space = False
    #: Whether only calls of the request's tools count, if those are known.
    known_only = False

    def identity(self, index: int) -> str | None:
        """Return an identifier for a call without one, if templates need a special form."""
        return None

    def alone(self) -> MessageReader:
        return self.reader(self.context, self)

    def structural_tag(self) -> Mapping[str, object] | None:
        """Return the constraint for calls of the request's tools, spelled as in the first example.

        Raises RequestError for parameters that the constraint cannot express.
        """
        layout, openers = self.layout(), self.strict_openers()
        has_start = bool(openers or self.bare_heads())
        if layout is None or (self.context.tool_choice == "auto" and not has_start):
            return None

        def call(function: Function) -> Element:
            return self.strict_call(layout.call, function)

        return as_tag(calls_of(layout, call, self.context, openers, self.bare_heads()))

    def layout(self) -> Layout | None:
        """Return how calls are spelled; None if the first example does not show it."""
        return None

    def strict_call(self, call: str, function: Function) -> Element:
        """The element for one call of a tool, spelled as `call`."""
        return json_call(call, function)

    def strict_openers(self) -> tuple[str, ...]:
        """Markers that begin calls, and that text before calls must not contain."""
        return self.openers

    def bare_heads(self) -> str:
        """First characters of messages that are calls without a marker."""
        return ""


class ReasoningFormat(Format, ReasoningParser):
    """A format of reasoning."""

    #: Creates an editor for the text of content, and one for reasoning.
    edit: Callable[[], Edit] | None = None

    @property
    def opened(self) -> bool:
        """Whether the message begins inside reasoning."""
        return False

    @property
    def reasoning(self) -> bool:
        return self.opened if self._reader is None else self._reader.thinking

    @property
    def reasoning_end(self) -> str | None:
        if self._reader is None:
            self._reader = self.alone()
        return self._reader.reasoning_end

    def ending(self, message: MessageReader) -> str | None:
        """Return the text that ends the current reasoning; None if it cannot be forced now."""
        return None

    def alone(self) -> MessageReader:
        return self.reader(self.context, None, self)


def _forced(context: ParseContext) -> bool:
    """Whether a grammar constrains the calls; it may spell markers with any tokens."""
    return context.grammar_enforced or context.tool_choice not in ("auto", "none")


#: Tokenizer -> markers that were looked up in it -> their ids.
_KNOWN: WeakKeyDictionary[Tokenizer, dict[frozenset[str], dict[int, str]]] = WeakKeyDictionary()


def _special(tokenizer: Tokenizer, marker_texts: frozenset[str]) -> dict[int, str]:
    """Id -> text of the markers that are single added tokens of the vocabulary."""
    cached = _KNOWN.setdefault(tokenizer, {})
    if marker_texts not in cached:
        added = tokenizer.added_tokens
        cached[marker_texts] = {added[word]: word for word in marker_texts if word in added}
    return cached[marker_texts]


def _encodable(name: str) -> str:
    return name if name.isascii() else name.encode("utf-8", "replace").decode("utf-8")
