"""Calls that the request forced: a grammar made the text pure JSON, whatever the model's format.

With a named tool the text is the arguments object; with `tool_choice="required"` it is an array
of `{"name": ..., "parameters": {...}}` objects, as in vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.contracts.parser import (
    Content,
    Event,
    ToolArguments,
    ToolEnd,
    ToolParser,
    ToolStart,
)
from modulm_parsing.objects import ObjectReader, loads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.parser import ParseContext
    from modulm_parsing.objects import Member

__all__ = ["CallReader", "NamedCall", "RequiredCalls"]


class CallReader:
    """One call object, `{"name": ..., "arguments": {...}}` in either order, as events.

    The name must be known before the call is announced; arguments that come first wait for it.
    Arguments written as a JSON string that holds an object are unwrapped.
    """

    def __init__(self, index: int, argument_keys: tuple[str, ...]) -> None:
        self.index = index
        self.announced = False
        self._keys = argument_keys
        self._reader = ObjectReader()
        self._name_text = ""
        self._name: str | None = None
        self._arguments = ""
        self._arguments_done = False
        self._sent = 0

    @property
    def done(self) -> bool:
        """Whether the object's closing brace was read."""
        return self._reader.done

    @property
    def broken(self) -> bool:
        """Whether the text is no call: not an object, no name, or arguments of another type."""
        return self._reader.broken or (self.done and not self._valid())

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Read more; the second result is what follows the object."""
        members, rest = self._reader.feed(text)
        for member in members:
            self._take(member)
        return self._news() if self._name else [], rest

    def _take(self, member: Member) -> None:
        if member.key == "name" and self._name is None:
            self._name_text += member.text
            if member.done:
                name = loads(self._name_text)
                self._name = name if isinstance(name, str) else ""
        elif member.key in self._keys and not self._arguments_done:
            self._arguments = (self._arguments + member.text).lstrip()
            self._arguments_done = member.done
            if member.done and not self._arguments.startswith("{"):
                self._arguments = _unwrapped(self._arguments)

    def _news(self) -> list[Event]:
        events: list[Event] = []
        if not self.announced:
            self.announced = True
            events.append(ToolStart(self.index, self._name or ""))
        whole = self.done and self._valid()
        if whole and not self._arguments:
            self._arguments = "{}"
        if self._arguments.startswith("{") and len(self._arguments) > self._sent:
            events.append(ToolArguments(self.index, self._arguments[self._sent :]))
            self._sent = len(self._arguments)
        if whole:
            events.append(ToolEnd(self.index))
        return events

    def _valid(self) -> bool:
        return bool(self._name) and (
            not self._arguments or isinstance(loads(self._arguments), dict)
        )


def _unwrapped(text: str) -> str:
    """Arguments that are not written as an object: null, or a string that holds one."""
    if text.strip() == "null":
        return "{}"
    value = loads(text)
    return value.strip() if isinstance(value, str) else text


class NamedCall(ToolParser):
    """The whole text is the arguments of the one tool that the request named."""

    name = "named"
    api = 1

    def __init__(self, context: ParseContext, tool: str) -> None:
        super().__init__(context)
        self._tool = tool
        self._reader = ObjectReader()
        self._text = ""
        self._started = False

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        events: list[Event] = []
        if not self._started:
            text = text.lstrip()
            if not text:
                return events
            self._started = True
            events.append(ToolStart(0, self._tool))
        if self._over():
            return events
        _, rest = self._reader.feed(text)
        used = text[: len(text) - len(rest)]
        self._text += used
        if used:
            events.append(ToolArguments(0, used))
        if self._reader.done and isinstance(loads(self._text), dict):
            events.append(ToolEnd(0))
        return events

    def _over(self) -> bool:
        return self._reader.done or self._reader.broken

    def finish(self) -> list[Event]:
        return []


class RequiredCalls(ToolParser):
    """The whole text is a JSON array of calls."""

    name = "required"
    api = 1

    def __init__(self, context: ParseContext) -> None:
        super().__init__(context)
        self._calls = 0
        self._call: CallReader | None = None
        self._opened = False
        self._plain = False

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Event]:
        events: list[Event] = []
        while text and not self._plain:
            if self._call is None:
                text = self._between(text)
            else:
                more, text = self._call.feed(text)
                events += more
                if self._call.done or self._call.broken:
                    self._call = None
        if text:
            events.append(Content(text))
        return events

    def finish(self) -> list[Event]:
        return []

    def _between(self, text: str) -> str:
        text = text.lstrip(" \t\r\n,]" if self._opened else None)
        if not text:
            return ""
        if text[0] == "[" and not self._opened:
            self._opened = True
            return text[1:]
        if text[0] != "{":
            self._plain = True
            return text
        self._call = CallReader(self._calls, ("parameters", "arguments"))
        self._calls += 1
        return text
