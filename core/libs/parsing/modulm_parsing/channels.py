"""Formats in which a turn consists of messages with headers that name recipient and channel."""

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
    """Recipient, channel and content type of a message."""

    recipient: str | None = None
    channel: str | None = None
    type: str | None = None


class ChannelReader(MessageReader):
    """Reads `<|start|>assistant to=WHOM<|channel|>NAME <|constrain|>TYPE<|message|>BODY<|end|>`.

    Every part of a header except `<|message|>` is optional; the first message of a turn begins
    where the prompt ended. A message without an end marker ends where the next header begins.
    """

    #: Markers that end a message.
    ends: ClassVar[tuple[str, ...]] = ("<|end|>", "<|return|>", "<|call|>")
    #: The header of messages for the user.
    answer: ClassVar[str] = f"{CHANNEL}final{MESSAGE}"
    #: Markers that begin a header after a message, or inside it if its end is missing.
    inner: ClassVar[tuple[str, ...]] = (START, CHANNEL)

    def __init__(
        self,
        context: ParseContext,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        super().__init__(context, tools, reasoning)
        self.header: Header | None = None  # of the current message
        self.rounds = 0  # number of reasoning messages in this turn
        prompted = _prompted_header(context)
        if prompted:
            self.source.push(prompted)
            next(self._steps, None)

    @staticmethod
    @abstractmethod
    def is_thought(header: Header) -> bool:
        """Whether a message is reasoning."""

    @staticmethod
    @abstractmethod
    def called(header: Header) -> str | None:
        """Return the tool that a message is addressed to."""

    @staticmethod
    def is_dropped(header: Header) -> bool:
        """Whether a message is discarded."""
        return False

    def body(self) -> Steps[None]:
        source = self.source
        headers: list[Header] = []
        yield from self._first(headers)
        boundaries = markers(*self.ends, *self.inner)
        while True:
            self.header = header = headers[-1] if headers else None
            self.rounds += header is not None and self.is_thought(header)
            emit = self._writer(header)
            if header is not None:
                yield from source.space()
                if self.called(header) is not None and isinstance(self.tools, ChannelTools):
                    name = self.called(header) or ""
                    yield from self.attempt(self.tools.message(self, name), "", emit)
            word = yield from source.until(boundaries, emit, quotes=True)
            while word is not None and word not in self.ends:
                before = len(headers)
                yield from self.attempt(self._header(word, headers), word, emit)
                if len(headers) > before:
                    break
                word = yield from source.until(boundaries, emit, quotes=True)
            if word is None:
                return
            if word in self.ends:
                self.header = None
                headers.clear()
                self.layout()
                yield from self._first(headers)
            self.layout()

    def _first(self, headers: list[Header]) -> Steps[None]:
        """Read a header where a message may begin."""
        with suppress(Ended):
            space = yield from self.source.space()
            word = yield from self.source.expect(_HEADS)
            if word is None:
                self.content(space)
            else:
                yield from self.attempt(self._header(word, headers), space + word, self.content)

    def _header(self, word: str, headers: list[Header]) -> Steps[None]:
        """Read the rest of a header."""
        header = yield from _read_header(self.source, word)
        text = "".join(self.source.unconfirmed or ())
        self.source.unconfirmed = None
        headers.append(header)
        self.thinking = self.thoughts is not None and self.is_thought(header)
        if self.called(header) is not None and self.tools is None:
            self.content(text)  # no tool parser: calls stay text as written

    def _writer(self, header: Header | None) -> Callable[[str], None]:
        """Return the function that receives the text of a message."""
        if header is not None and self.is_dropped(header):
            return _ignore
        if header is not None and self.is_thought(header):
            return Pen(self.reasoning).write
        return self.content


def _ignore(text: str) -> None:
    pass


def _read_header(source: Source, opener: str) -> Steps[Header]:
    """Read a header after its first part. Raises NotACall."""
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


def _prompted_header(context: ParseContext) -> str:
    """Return the part of the turn's first header that the prompt contains."""
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
        """No marker opens a region outside of messages."""
        yield from ()


class ChannelReasoning(ReasoningFormat):
    """Messages that are reasoning. The model is reasoning until the answer's header arrives."""

    tells_end = True
    reader: type[ChannelReader]

    @property
    def words(self) -> tuple[str, ...]:
        return (START, MESSAGE, CHANNEL, CONSTRAIN, *self.reader.ends)

    def ending(self, message: MessageReader) -> str | None:
        """Return the text that ends the reasoning and starts another message.

        The model chooses the kind of the next message, so that it may call a tool. If that is
        reasoning again, the answer's header is forced as well.
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
        source.push(_prompted_header(self.context))
        source.final = True
        headers: list[Header] = []

        def read() -> Steps[None]:
            word = yield from source.expect(_HEADS)
            if word is not None:
                headers.append((yield from _read_header(source, word)))

        with suppress(NotACall):
            next(read(), None)
        return not headers or self.reader.is_thought(headers[0])

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        """No marker opens a region outside of messages."""
        yield from ()
