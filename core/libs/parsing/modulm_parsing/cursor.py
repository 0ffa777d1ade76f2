"""Search for markers in streamed text."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["Cursor"]

_QUOTES = "`\"'"
_OPENERS = " \t\r\n([{<,;:=-"


class Cursor:
    """Text that has arrived and is not consumed yet.

    `until` returns the text before the next marker, as far as it is certain: a tail that could
    begin a marker is held back until more text decides. The held-back text is never longer than the
    longest marker, so the work is linear in the text, however it is divided into pieces.

    A quoted marker (a quote mark or backtick right before it and the same one right after) counts
    as text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._before = ""  # two characters before the text, to recognize an opening quote

    def push(self, text: str) -> None:
        """Append text."""
        self._before = (self._before + self._text[: self._at][-2:])[-2:]
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def empty(self) -> bool:
        """Whether all text is consumed."""
        return self._at >= len(self._text)

    def rest(self) -> str:
        """Consume everything."""
        return self._consume(len(self._text))

    def peek(self) -> str:
        """The unconsumed text."""
        return self._text[self._at :]

    def space(self) -> str:
        """Consume leading white space."""
        end = self._at
        while end < len(self._text) and self._text[end].isspace():
            end += 1
        return self._consume(end)

    def take(self, count: int) -> str:
        """Consume `count` characters."""
        return self._consume(self._at + count)

    def back(self, count: int) -> None:
        """Undo the consumption of the last `count` characters since the last `push`."""
        self._at -= count

    def starts(self, word: str) -> bool | None:
        """Whether the text begins with `word`; None if more text must decide."""
        head = self._text[self._at : self._at + len(word)]
        if head == word:
            return True
        return None if word.startswith(head) else False

    def until(self, markers: tuple[str, ...], *, final: bool = False) -> tuple[str, str | None]:
        """Consume text up to and including the first marker: (text before it, the marker).

        The marker is None if none is complete yet; then the text is what certainly precedes any
        marker. With `final`, no more text will come and nothing is held back.
        """
        search = _pattern(markers)
        start = self._at
        end = self._certain(markers, start, final=final)
        while (match := search.search(self._text, start)) and match.start() < end:
            quoted = self._quoted(match.start(), match.end(), final)
            if quoted is None:
                return self._consume(match.start()), None
            if not quoted:
                text = self._consume(match.start())
                return text, self._consume(match.end())
            start = match.end()
            end = self._certain(markers, start, final=final)
        return self._consume(end), None

    def _consume(self, end: int) -> str:
        end = min(end, len(self._text))
        text = self._text[self._at : end]
        self._at = end
        return text

    def _quoted(self, start: int, end: int, final: bool) -> bool | None:
        before = (self._before + self._text[max(0, start - 2) : start])[-2:]
        quote = before[-1:]
        if not quote or quote not in _QUOTES:
            return False
        if len(before) == 2 and before[0] not in _OPENERS:
            return False
        if end >= len(self._text):
            return False if final else None
        return self._text[end] == quote

    def _certain(self, markers: tuple[str, ...], start: int, *, final: bool) -> int:
        """Return the index from which more text could make a marker, or a longer one."""
        size = len(self._text)
        if final:
            return size
        longest = max(map(len, markers))
        for at in range(max(start, self._at, size - longest + 1), size):
            tail = self._text[at:]
            if any(marker.startswith(tail) and marker != tail for marker in markers):
                return at
        return size


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(re.escape(marker) for marker in longest_first))
