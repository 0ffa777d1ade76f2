"""Formats in which a turn is made of messages, each with a header that says for whom it is."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from attrs import frozen

from modulm.contracts.parser import ParseContext
from modulm_parsing.reading import MessageReader, ReasoningFormat, ToolFormat
from modulm_parsing.source import Ended, NotACall, Source, Steps, markers
from modulm_parsing.strict import Layout, written
from modulm_parsing.thoughts import Pen

__all__ = ["ChannelReader", "ChannelReasoning", "ChannelTools", "Header"]

START, MESSAGE, CHANNEL, CONSTRAIN = "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"
_ASSISTANT = f"{START}assistant"
_WORD = re.compile(r"[\w.\-:/]*")
_HEADS = markers(START, CHANNEL, MESSAGE, "to=")
_PARTS = markers(START, CHANNEL, CONSTRAIN, MESSAGE, "to=")


@frozen
class Header:
    """For whom a message is, on which channel, and what its body is."""

    recipient: str | None = None
    channel: str | None = None
    type: str | None = None


class ChannelReader(MessageReader):
    """Reads `<|start|>assistant to=WHOM<|channel|>NAME <|constrain|>TYPE<|message|>BODY<|end|>`.

    Every part of a header may be missing but `<|message|>`; the first message of a turn begins
    where the prompt ended. A message whose end is missing ends where the next header begins.
    """

    #: What ends a message.
    ends: ClassVar[tuple[str, ...]] = ("<|end|>", "<|return|>", "<|call|>")
    #: The header of what the user is to read.
    answer: ClassVar[str] = f"{CHANNEL}final{MESSAGE}"
    #: What begins a header behind a message, or in it where its end is missing.
    inner: ClassVar[tuple[str, ...]] = (START, CHANNEL)

    def __init__(
        self,
        context: ParseContext,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        super().__init__(context, tools, reasoning)
        self.header: Header | None = None  # of the message whose body is being read
        self.rounds = 0  # thoughts that this turn has begun
        begun = _begun(context)
        if begun:
            self.source.push(begun)
            next(self._steps, None)

    @staticmethod
    @abstractmethod
    def is_thought(header: Header) -> bool:
        """Whether a message is reasoning."""

    @staticmethod
    @abstractmethod
    def called(header: Header) -> str | None:
        """The tool that a message is for."""

    @staticmethod
    def is_dropped(header: Header) -> bool:
        """Whether a message is for nobody."""
        return False

    def body(self) -> Steps[None]:
        source = self.source
        found: list[Header] = []
        yield from self._first(found)
        words = markers(*self.ends, *self.inner)
        while True:
            self.header = header = found[-1] if found else None
            self.rounds += header is not None and self.is_thought(header)
            emit = self._writer(header)
            if header is not None:
                yield from source.space()
                if self.called(header) is not None and isinstance(self.tools, ChannelTools):
                    name = self.called(header) or ""
                    yield from self.attempt(self.tools.message(self, name), "", emit)
            word = yield from source.until(words, emit, quotes=True)
            while word is not None and word not in self.ends:
                before = len(found)
                yield from self.attempt(self._header(word, found), word, emit)
                if len(found) > before:
                    break
                word = yield from source.until(words, emit, quotes=True)
            if word is None:
                return
            if word in self.ends:
                self.header = None
                found.clear()
                self.layout()
                yield from self._first(found)
            self.layout()

    def _first(self, found: list[Header]) -> Steps[None]:
        """A header where a message may begin."""
        with suppress(Ended):
            space = yield from self.source.space()
            word = yield from self.source.expect(_HEADS)
            if word is None:
                self.content(space)
            else:
                yield from self.attempt(self._header(word, found), space + word, self.content)

    def _header(self, word: str, found: list[Header]) -> Steps[None]:
        """The rest of a header."""
        header = yield from _read_header(self.source, word)
        held = "".join(self.source.held or ())
        self.source.held = None
        found.append(header)
        self.thinking = self.thoughts is not None and self.is_thought(header)
        if self.called(header) is not None and self.tools is None:
            self.content(held)  # nobody here reads calls: they stay as they are written

    def _writer(self, header: Header | None) -> Callable[[str], None]:
        """Where the text of a message goes."""
        if header is not None and self.is_dropped(header):
            return _ignore
        if header is not None and self.is_thought(header):
            return Pen(self.reasoning).write
        return self.content


def _ignore(text: str) -> None:
    pass


def _read_header(source: Source, opener: str) -> Steps[Header]:
    """The rest of a header, behind its first part. Raises NotACall."""
    parts: dict[str, str] = {}
    word: str | None = opener
    while word != MESSAGE:
        part = yield from source.run(_WORD)
        if word is None and not part:
            raise NotACall
        parts[word or "type"] = part
        yield from source.space()
        word = yield from source.expect(_PARTS)
    kind = parts.get(CONSTRAIN, parts.get("type"))
    return Header(parts.get("to="), parts.get(CHANNEL), kind)


def _begun(context: ParseContext) -> str:
    """What the prompt has written of the turn's first header, or all of it."""
    tail = context.prompt_tail or ""
    if _ASSISTANT not in tail:
        return ""
    header = tail[tail.rindex(_ASSISTANT) + len(_ASSISTANT) :]
    return header[: header.rindex(MESSAGE) + len(MESSAGE)] if MESSAGE in header else header.strip()


class ChannelTools(ToolFormat):
    """Calls that are messages to a tool."""

    reader: type[ChannelReader]

    @property
    def words(self) -> tuple[str, ...]:
        return (START, MESSAGE, CHANNEL, CONSTRAIN, *self.reader.ends)

    def layout(self) -> Layout | None:
        text = written(self.examples)
        return None if text is None else Layout(text, between=_ASSISTANT)

    @abstractmethod
    def message(self, message: MessageReader, name: str) -> Steps[None]:
        """Read the body of a message to the tool `name`. Raises NotACall."""

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """Nothing opens a region outside of a message."""
        yield from ()


class ChannelReasoning(ReasoningFormat):
    """Messages that are thoughts. Until the header of the answer is there, the model thinks."""

    tells_end = True
    reader: type[ChannelReader]

    @property
    def words(self) -> tuple[str, ...]:
        return (START, MESSAGE, CHANNEL, CONSTRAIN, *self.reader.ends)

    def ending(self, message: MessageReader) -> str | None:
        """The end of a thought and the beginning of another message.

        What kind of one is left to the model, so that it may call; if it is a thought again, the
        answer's header comes with it.
        """
        if not isinstance(message, ChannelReader):
            return None
        if message.header is None or not message.is_thought(message.header):
            return None
        more = self.reader.answer if message.rounds > 1 else ""
        return f"{self.reader.ends[0]}{_ASSISTANT}{more}"

    @property
    def opened(self) -> bool:
        source = Source()
        source.push(_begun(self.context))
        source.final = True
        found: list[Header] = []

        def read() -> Steps[None]:
            word = yield from source.expect(_HEADS)
            if word is not None:
                found.append((yield from _read_header(source, word)))

        with suppress(NotACall):
            next(read(), None)
        return not found or self.reader.is_thought(found[0])

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """Nothing opens a region outside of a message."""
        yield from ()
