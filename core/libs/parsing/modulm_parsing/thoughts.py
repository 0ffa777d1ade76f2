"""Formats of reasoning between tags."""

from __future__ import annotations

from collections.abc import Callable

from modulm.contracts.parser import ParseContext
from modulm_parsing.reading import MessageReader, ReasoningFormat
from modulm_parsing.source import NotACall, Source, Steps, markers

__all__ = ["Pen", "Thoughts"]


class Thoughts(ReasoningFormat):
    """Reasoning between tags, before the answer and between calls.

    opening, closing: the tags, possibly in several spellings. The prompt's end shows whether the
    template has opened the reasoning; if it is unknown, `prompt_opens` says what templates do.
    switches: template keywords that turn thinking on or off; `on` is the default. ends: call
    markers that end reasoning like the closing tag. turn: what a prompt writes before the model's
    turn; only the text after the last one is examined.

    White space directly inside the tags and after them is layout.
    """

    tells_end = True
    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    prompt_opens = True
    switches: tuple[str, ...] = ()
    on = True
    ends: tuple[str, ...] = ()
    turn = ""
    #: Whether reasoning may open anywhere, not only at the start.
    anywhere = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "openers" not in vars(cls):
            cls.openers = (*cls.opening, *cls.closing)
        if "wanted" in vars(cls):  # the former name of `thinking_enabled`
            cls.thinking_enabled = vars(cls)["wanted"]  # type: ignore[method-assign]

    def __init__(self, context: ParseContext) -> None:
        super().__init__(context)
        self._unclosed = False  # a call has ended reasoning whose closing tag may still follow
        self._tag = ""  # the tag that opened the reasoning

    @property
    def words(self) -> tuple[str, ...]:
        return self.ends

    # Start of the message.

    def thinking_enabled(self) -> bool:
        """Whether the request's template keywords turn thinking on."""
        values = [self.context.template_kwargs[s] for s in self.switches
                 if s in self.context.template_kwargs]  # fmt: skip
        return any(map(bool, values)) if values else self.on

    def _prompted(self) -> bool | None:
        """Whether the prompt leaves reasoning open; None if unknown."""
        tail = self.context.prompt_tail
        if tail is None:
            return None
        if self.turn and self.turn in tail:
            tail = tail[tail.rindex(self.turn) :]
            opened = max(tail.rfind(word) for word in self.opening)
            closed = max(tail.rfind(word) for word in self.closing)
            return None if opened == closed else opened > closed
        tail = tail.rstrip()
        if tail.endswith(self.opening):
            return True
        return False if tail.endswith(self.closing) else None

    @property
    def opened(self) -> bool:
        prompted = self._prompted()
        if prompted is not None:
            return prompted
        return self.context.prompt_tail is None and self.prompt_opens and self.thinking_enabled()

    def begin(self, message: MessageReader) -> Steps[None]:
        source = message.source
        opened = self.opened
        if not opened and (self._prompted() is False or not self.thinking_enabled()):
            return
        space = yield from source.space()
        if (yield from source.over()):
            message.thinking = opened
            message.content("" if opened else space)
            return
        word = yield from source.expect(markers(*self.opening))
        self._tag = word or ""
        if word is not None:
            yield from message.attempt(self.read(message, word), word, message.content)
        elif opened:
            yield from self.thought(message)
        else:
            message.content(space)

    # Inside the message.

    def read(self, message: MessageReader, opener: str) -> Steps[None]:
        source = message.source
        if opener in self.closing:
            if not self._unclosed:
                raise NotACall
            self._unclosed = False
            message.layout()
            source.unconfirmed = None
            yield from source.space()
        elif self.anywhere or (message.at_start and not self._closed_before(message)):
            yield from self.label(source)
            source.unconfirmed = None
            self._tag = opener
            yield from self.thought(message)
        else:
            raise NotACall

    def _closed_before(self, message: MessageReader) -> bool:
        """Whether the message has just begun after a prompt that closed its reasoning."""
        return not message.calls and not message.thought and self._prompted() is False

    def label(self, source: Source) -> Steps[None]:
        """Read what follows the opening tag. Raises NotACall if the tag opens no reasoning."""
        yield from ()

    def thought(self, message: MessageReader) -> Steps[None]:
        """Read reasoning after its opening tag."""
        source = message.source
        message.thinking = True
        yield from source.space()
        boundaries = markers(*self.closing, *self.ends)
        pen = Pen(self.writer(message))
        while True:
            word = yield from source.until(boundaries, pen.write, quotes=True)
            if word not in self.ends or (yield from self.call(message, word, pen)):
                break
        message.thinking = False
        self._unclosed = word not in self.closing
        message.layout()
        if word is None:
            self.cut(message)
        elif not self._unclosed:
            yield from self.after(message, word)

    def ending(self, message: MessageReader) -> str | None:
        """Return the closing tag that matches the opening one."""
        tag = self._tag or self._prompted_tag()
        several = len(self.opening) == len(self.closing) and tag in self.opening
        return self.closing[self.opening.index(tag) if several else 0]

    def _prompted_tag(self) -> str:
        """Return the opening tag at the prompt's end, if any."""
        tail = (self.context.prompt_tail or "").rstrip()
        return next((word for word in self.opening if tail.endswith(word)), "")

    def writer(self, message: MessageReader) -> Callable[[str], None]:
        """Return the function that receives the text of the reasoning."""
        return message.reasoning

    def cut(self, message: MessageReader) -> None:
        """Called when the text ended inside reasoning."""

    def after(self, message: MessageReader, word: str) -> Steps[None]:
        """Read what follows the closing tag."""
        yield from message.source.space()

    def call(self, message: MessageReader, word: str | None, pen: Pen) -> Steps[bool]:
        """End reasoning at a call; what only looks like one is part of the reasoning."""
        tools = message.tools
        if word is None:
            return True
        if tools is None or word not in tools.openers:
            message.content(word)
            return True
        return (yield from message.attempt(tools.read(message, word), word, pen.write))


class Pen:
    """Writes reasoning; white space is emitted only if more text follows."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._space: list[str] = []

    def write(self, text: str) -> None:
        stripped = text.rstrip()
        tail = text[len(stripped) :]
        if stripped:
            if self._space:
                stripped = "".join([*self._space, stripped])
                self._space.clear()
            self._emit(stripped)
        if tail:
            self._space.append(tail)
