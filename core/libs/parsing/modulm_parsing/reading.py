"""One message read as a whole: content, reasoning and calls as one grammar.

A format says which markers open a region and reads what is inside; `MessageReader` reads the
content between regions and turns all of it into events. A reasoning format and a tool format are
read by one `MessageReader`, so that a thought may stand between calls and the ids of tokens say
the same to both.
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
    """Reads one message with the formats of its parsers and gives events.

    White space around a call is layout; where content stands on both sides, what was before the
    call stays between.
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
        self._said = False  # there was content
        self.at_start = True  # nothing but white space since the answer or the last call began
        self.source = Source()
        self._space: list[str] = []
        self._events: list[Event] = []
        self._kind: type[Content | Reasoning | ToolArguments] = Content
        self._parts: list[str] = []
        self._json: list[str] = []  # the current call's arguments as the model wrote them
        self._owners: dict[str, Format] = {}
        self._framing = frozenset(
            word
            for format_ in (tools, reasoning)
            if format_ is not None
            for word in format_.framing
        )
        for format_ in (tools, reasoning):
            if format_ is not None:
                words = (*format_.framing, *format_.openers)
                self._owners.update(dict.fromkeys(words, format_))
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
        words = {w for f in (self.tools, self.thoughts) if f is not None for w in f.every_word()}
        self.source = Source(_special(tokenizer, frozenset(words)))
        self.source.decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def reasoning_end(self) -> str | None:
        """See `ReasoningParser.reasoning_end`."""
        if self.thoughts is None or not self.thinking or self.source.held is not None:
            return None
        return self.thoughts.ending(self)

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        """Take more text and the ids that it came from; give what is certain."""
        self.source.push(text, ids)
        next(self._steps, None)
        return self._taken()

    def finish(self) -> list[Event]:
        """The text has ended: give what was held back."""
        self.source.final = True
        next(self._steps, None)
        return self._taken()

    def _taken(self) -> list[Event]:
        if self._parts:
            self._flush()
        events, self._events = self._events, []
        return events

    # What readers tell.

    def content(self, text: str) -> None:
        """Text for the user."""
        if self.at_start and (self.calls or self.thought):
            text = text.lstrip()
        if not text:
            return
        kept = text.rstrip()
        tail = text[len(kept) :]
        if kept:
            self.at_start = False
            self._said = True
            if self._space:
                kept = "".join([*self._space, kept])
                self._space.clear()
            self._put(Content, kept)
        if tail:
            self._space.append(tail)

    def verbatim(self, text: str) -> None:
        """Text for the user whose white space counts wherever it stands."""
        if text:
            self.at_start = self.at_start and text.isspace()
            self._put(Content, text)

    def reasoning(self, text: str) -> None:
        """Text of the model's reasoning."""
        self.thought = True
        if text:
            self._put(Reasoning, text)

    def start(self, name: str, identity: str | None = None) -> Schema | None:
        """A call begins, and what was held is part of it; the schema of its parameters, if known.

        Raises NotACall for a name that is none.
        """
        tools = self.context.tools
        schema = parameters_of(tools, name)
        unknown = schema is None and tools and self.tools is not None and self.tools.known_only
        if not name or name.isspace() or unknown:
            raise NotACall
        self.source.held = None
        self.thinking = False
        self.at_start = True
        if not self._said:
            self._space.clear()
        self._settle()
        if identity is None and self.tools is not None:
            identity = self.tools.identity(self.calls)
        self._events.append(ToolStart(self.calls, _encodable(name), identity))
        self.calls += 1
        self._json = []
        return schema

    def layout(self) -> None:
        """The white space so far was layout, as what comes first now is."""
        self._space.clear()
        self.at_start = True

    def arguments(self, text: str) -> None:
        """More of the arguments, as JSON that a reader has written."""
        if text:
            self._put(ToolArguments, text)

    def raw_arguments(self, text: str) -> None:
        """More of the arguments as the model wrote them; `end_raw` checks them."""
        self._json.append(text)
        self._put(ToolArguments, text)

    def end(self) -> None:
        """The call is complete."""
        self._flush()
        self._events.append(ToolEnd(self.calls - 1))

    def end_raw(self) -> None:
        """The call is complete if what was written is an object; `{}` if nothing was."""
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
        """What comes now is of another kind."""
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
        """Content and the regions in it, to the end."""
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
        """Read a region; what turns out to be none goes to `prose` as it was written.

        Whether it was one.
        """
        source = self.source
        source.held = [opener]
        with suppress(NotACall):
            yield from steps
        held, source.held = source.held, None
        if held:
            prose("".join(held))
        return not held

    def optional(self, *words: str) -> Steps[str | None]:
        """Behind a call: read one of the words, if it comes, and the white space before it.

        Raises Ended.
        """
        space = yield from self.source.space()
        found = yield from self.source.expect(markers(*words))
        if found is None and self.tools is not None and self.tools.keeps_space:
            self.verbatim(space)
        return found

    def value(self, schema: Schema | None, key: str, *, framed: bool = False) -> ValueWriter:
        """A writer for the argument `key` of the current call."""
        return ValueWriter(self.arguments, allowed_kinds(schema, key), framed=framed)


def allowed_kinds(schema: Schema | None, key: str) -> frozenset[str]:
    """The JSON types that a parameter may have."""
    properties = schema.get("properties") if schema is not None else None
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    return kinds(declared, schema)


class Edit(Protocol):
    """What changes text on its way to the user."""

    def feed(self, text: str) -> str:
        """More text: what is certain of it, changed."""

    def finish(self) -> str:
        """The text has ended: what was held back."""


class Format(Parser):
    """What a format of reasoning or calls has in common: it is a parser by itself, too."""

    def __init__(self, context: ParseContext) -> None:
        super().__init__(context)
        tokenizer = context.tokenizer
        if tokenizer is not None:
            special = set(tokenizer.special_tokens)
            self.special_tokens = tuple(word for word in self.every_word() if word in special)
        self._reader: MessageReader | None = None

    #: What reads a message of this format; two formats with one reader are one grammar.
    reader: type[MessageReader] = MessageReader
    #: Markers that open a region, wherever they stand in content.
    openers: tuple[str, ...] = ()

    #: Markers in content that are neither content nor open anything.
    framing: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Markers that may be single tokens of a vocabulary, beside openers and framing."""
        return ()

    def every_word(self) -> tuple[str, ...]:
        """All markers that may be single tokens of a vocabulary."""
        return tuple(dict.fromkeys((*self.openers, *self.framing, *self.words)))

    @abstractmethod
    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """Read a region behind its opener. Raises NotACall where it is none after all."""

    def begin(self, message: MessageReader) -> Steps[None]:
        """Read what may stand at the beginning only."""
        yield from ()

    @abstractmethod
    def alone(self) -> MessageReader:
        """A reader of a message with this format only."""

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
        """Characters that were looked at so far, each time that one was."""
        return 0 if self._reader is None else self._reader.source.steps


class ToolFormat(Format, ToolParser):
    """A format of calls."""

    #: White space beside calls is content.
    keeps_space = False
    #: Only calls of the request's tools are calls, if those are known.
    known_only = False

    def identity(self, index: int) -> str | None:
        """An identifier for a call that carries none, where templates want a special form."""
        return None

    def alone(self) -> MessageReader:
        return self.reader(self.context, self)

    def structural_tag(self) -> Mapping[str, object] | None:
        """What holds an answer to the request's tools, spelled as in the first example.

        Raises RequestError for parameters that this format cannot be held to.
        """
        layout, openers = self.layout(), self.strict_openers()
        told = bool(openers or self.bare_heads())
        if layout is None or (self.context.tool_choice == "auto" and not told):
            return None

        def call(function: Function) -> Element:
            return self.strict_call(layout.call, function)

        return as_tag(calls_of(layout, call, self.context, openers, self.bare_heads()))

    def layout(self) -> Layout | None:
        """How calls are spelled; None where the first example does not show it."""
        return None

    def strict_call(self, call: str, function: Function) -> Element:
        """One call of a tool, spelled as `call`."""
        return json_call(call, function)

    def strict_openers(self) -> tuple[str, ...]:
        """What a text before calls does not hold; the calls begin with one of these."""
        return self.openers

    def bare_heads(self) -> str:
        """What a message begins with that is calls without a marker."""
        return ""


class ReasoningFormat(Format, ReasoningParser):
    """A format of reasoning."""

    #: Makes what changes the text of content and reasoning, one for each.
    edit: Callable[[], Edit] | None = None

    @property
    def opened(self) -> bool:
        """Whether the message begins inside a thought."""
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
        """What ends the thought that a message is in; None where that cannot be written now."""
        return None

    def alone(self) -> MessageReader:
        return self.reader(self.context, None, self)


def _forced(context: ParseContext) -> bool:
    """Whether a grammar writes the calls; it may spell markers with any tokens."""
    return context.held or context.tool_choice not in ("auto", "none")


#: Tokenizer -> the words that were looked up in it -> their ids.
_KNOWN: WeakKeyDictionary[Tokenizer, dict[frozenset[str], dict[int, str]]] = WeakKeyDictionary()


def _special(tokenizer: Tokenizer, words: frozenset[str]) -> dict[int, str]:
    """Id -> text of the words that the vocabulary has as single added tokens."""
    known = _KNOWN.setdefault(tokenizer, {})
    if words not in known:
        added = tokenizer.added_tokens
        known[words] = {added[word]: word for word in words if word in added}
    return known[words]


def _encodable(name: str) -> str:
    return name if name.isascii() else name.encode("utf-8", "replace").decode("utf-8")
