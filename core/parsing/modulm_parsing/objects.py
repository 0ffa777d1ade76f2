"""Reading one JSON object while its text is still arriving (RFC 8259)."""

from __future__ import annotations

import json
import re
from typing import Any

from attrs import frozen

__all__ = ["Member", "ObjectReader", "loads"]

#: A model that nests deeper than this is looping, not calling a tool.
MAX_DEPTH = 128

_IN_STRING = re.compile(r'[^"\\]+|\\.?|"', re.DOTALL)
_OUTSIDE = re.compile(r'["{}\[\],:]|[^"{}\[\],:]+')
_CLOSES = {"}": "{", "]": "["}


@frozen
class Member:
    """More of one member's value, as the text it was written with; `done` when it is whole."""

    key: str
    text: str
    done: bool


def loads(text: str) -> Any:
    """The JSON value of `text`, or None if it is not valid JSON (too deep counts as invalid)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class ObjectReader:
    """One object, member by member, from its opening brace on; in time linear in the text.

    `feed` gives the members' values as they grow. Afterwards `done` says that the closing brace
    was read (what follows it is in the second result), `broken` that this is not a JSON object
    (the second result begins with the first character that cannot be part of one, wherever the
    text was cut).
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._open: list[str] = []
        self._string = False
        self._escaped = False
        self._word: list[str] = []  # the member name, or the space before a value
        self._key: str | None = None
        self._value = False  # inside a member's value
        self._pending: list[str] = []
        self._space = ""
        self._events: list[Member] = []

    def feed(self, text: str) -> tuple[list[Member], str]:
        """Read more; the second result is the text that is not part of the object."""
        self._events = []
        at = 0
        while at < len(text) and not (self.done or self.broken):
            at = self._step(text, at)
        self._flush(done=False)
        return self._events, text[at:]

    def _step(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._put(text[at])
            return at + 1
        pattern = _IN_STRING if self._string else _OUTSIDE
        match = pattern.match(text, at)
        if match is None:
            self.broken = True
            return at
        token = match.group()
        if self._string:
            self._in_string(token)
        else:
            self._outside(token)
        return at + len(token) - len(token.lstrip()) if self.broken else match.end()

    def _in_string(self, token: str) -> None:
        self._put(token)
        if token == "\\":
            self._escaped = True
        elif token == '"':
            self._string = False
            if len(self._open) == 1 and not self._value:
                self._name_ends()

    def _outside(self, token: str) -> None:
        depth = len(self._open)
        if token == '"':
            self._string = True
            self._put(token)
        elif token in "{[":
            self._opens(token)
        elif token in "}]":
            self._closes(token)
        elif depth == 1 and token == ",":
            self._flush(done=True)
        elif depth == 1 and token == ":" and not self._value:
            self._value = self._key is not None
            self.broken = self._key is None
        elif self._value:
            self._in_value(token)
        elif not token.isspace():
            self.broken = True

    def _opens(self, token: str) -> None:
        if len(self._open) >= MAX_DEPTH or (self._open and not self._value):
            self.broken = True
            return
        if self._open:
            self._put(token)
        elif token == "[":
            self.broken = True
        self._open.append(token)

    def _closes(self, token: str) -> None:
        if not self._open or self._open.pop() != _CLOSES[token]:
            self.broken = True
        elif self._open:
            self._put(token)
        else:
            self._flush(done=True)
            self.done = True

    def _in_value(self, token: str) -> None:
        """Space after a member's value is layout, unless more of the value follows."""
        kept = token.rstrip() if len(self._open) == 1 else token
        if kept:
            self._put(kept)
        self._space += token[len(kept) :]

    def _put(self, text: str) -> None:
        (self._pending if self._value else self._word).append(self._space + text)
        self._space = ""

    def _name_ends(self) -> None:
        name = loads("".join(self._word))
        self._word = []
        if self._key is not None or not isinstance(name, str):
            self.broken = True
        else:
            self._key = name

    def _flush(self, *, done: bool) -> None:
        if self._key is None or not self._value:
            self.broken = self.broken or (done and self._key is not None)
            return
        text = "".join(self._pending)
        self._pending = []
        if text or done:
            self._events.append(Member(self._key, text, done))
        if done:
            self._key, self._value, self._space = None, False, ""
