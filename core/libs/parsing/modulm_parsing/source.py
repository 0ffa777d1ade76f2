"""Streamed text for readers that are written as if all of it had arrived.

A reader is a generator: it asks the source for what comes next, and yields until more text arrives
if that is uncertain. Certainty depends on the text alone, never on how it was divided. Unread text
is never longer than the longest marker searched for, so the work is linear in the text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

__all__ = ["Ended", "Markers", "NotACall", "Source", "Steps", "markers"]

T = TypeVar("T")
#: A reader's progress; it yields when it needs more text.
Steps = Generator[None, None, T]

_QUOTES = "`\"'"
_OPENERS = " \t\r\n([{<,;:=-"
_SPACE = re.compile(r"\s*")


class NotACall(Exception):
    """Raised if a supposed region is not one; unless part of it was emitted, it becomes text."""


class Ended(NotACall):
    """The text ended inside a region."""


class Markers:
    """Markers to search for; of several at one position the longest counts."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = tuple(sorted(set(texts), key=len, reverse=True))
        whole = "|".join(re.escape(word) for word in self.texts) or r"(?!)"
        prefixes = "|".join(_beginnings(word) for word in self.texts if len(word) > 1) or r"(?!)"
        #: Group 1 is a complete marker; a match without it is a prefix at the end of the text.
        self.pattern = re.compile(rf"(?:{prefixes})\Z|({whole})")
        self.whole = re.compile(f"({whole})")
        heads = "".join(sorted({re.escape(word[0]) for word in self.texts}))
        self.head = re.compile(f"[{heads}]" if heads else r"(?!)")


@lru_cache(maxsize=1024)
def markers(*words: str) -> Markers:
    """Compile markers for a search."""
    return Markers(words)


def _beginnings(word: str) -> str:
    """Return a pattern for every proper prefix of `word`."""
    pattern = ""
    for letter in reversed(word[1:-1]):
        pattern = f"(?:{re.escape(letter)}{pattern})?"
    return re.escape(word[0]) + pattern


class Source:
    """Text that has arrived and is not read yet.

    special: id -> text of the markers that are single tokens. If ids are known, such a marker
    counts only where its id occurred; spelled with other tokens it is prose. If they are unknown, a
    marker in quotes (a quote mark right before it and the same one right after), or after an
    opening backtick, is prose. unconfirmed: text read since `hold`, which becomes prose if no call
    follows.
    """

    def __init__(self, special: Mapping[int, str] | None = None) -> None:
        self.text = ""
        self.at = 0
        self.final = False
        self.unconfirmed: list[str] | None = None
        self.steps = 0  # units of work, for tests of linear time
        self._base = 0  # position of text[0] in the whole text
        self._special = special or {}
        self._special_texts = frozenset(self._special.values())
        self._exact = False  # ids are known
        self._awaited: deque[tuple[str, list[int]]] = deque()
        self._run: list[int] = []  # ids since the last special one
        self._real: deque[int] = deque()  # positions of markers that arrived as ids
        self._placed = 0
        self._spelled = 0  # markers read as prose since the last real one
        self.decode: Callable[[list[int]], str] | None = None

    def push(self, text: str, ids: Sequence[int] = ()) -> None:
        """Append text and its token ids; ids may precede their text."""
        keep = self.at - 2 if self.at > 2 else 0  # keep two characters to recognize opening quotes
        self._base += keep
        self.at -= keep
        self.text = self.text[keep:] + text
        self.steps += len(self.text)
        if ids and self._special:
            self._exact = True
            self._take_ids(ids)
        if self._awaited:
            self._place()

    def _take_ids(self, ids: Sequence[int]) -> None:
        for index in ids:
            word = self._special.get(index)
            if word is None:
                self._run.append(index)
            else:
                self._awaited.append((word, self._run))
                self._run = []

    def _place(self) -> None:
        """Locate the text of the special tokens that arrived.

        Earlier occurrences of the same text spelled with other tokens are skipped; those tokens
        determine their number.
        """
        start = max(self._placed - self._base, self.at)
        total: dict[str, int] = {}
        for word, _ in self._awaited:
            total[word] = total.get(word, 0) + 1
        doubtful = {word for word, n in total.items() if self.text.count(word, start) > n}
        while self._awaited:
            word, run = self._awaited[0]
            at = self.text.find(word, start)
            if word in doubtful and self.decode is not None:
                at = self._skip(word, self.decode(run).count(word) - self._spelled, at)
            if at < 0:
                return
            self._awaited.popleft()
            self._real.append(self._base + at)
            self._spelled = 0
            start = at + len(word)
            self._placed = self._base + start

    def _skip(self, word: str, spelled: int, at: int) -> int:
        for _ in range(spelled):
            following = self.text.find(word, at + len(word))
            if following < 0:
                return at
            at = following
        return at

    def hold(self) -> None:
        """Start holding text that may have to become prose."""
        self.unconfirmed = []

    def advance(self, end: int) -> str:
        """Read up to the index `end` of `text`."""
        consumed = self.text[self.at : end]
        self.at = end
        if self.unconfirmed is not None:
            self.unconfirmed.append(consumed)
        return consumed

    def back(self, count: int) -> None:
        """Unread the last `count` characters since the last push."""
        self.at -= count

    def over(self) -> Steps[bool]:
        """Whether the text ends here."""
        while self.at >= len(self.text):
            if self.final:
                return True
            yield
        return False

    def peek(self) -> Steps[str]:
        """Return the next character, unread. Raises Ended."""
        while self.at >= len(self.text):
            if self.final:
                raise Ended
            yield
        return self.text[self.at]

    def space(self) -> Steps[str]:
        """Read white space, if any."""
        return (yield from self.run(_SPACE))

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the longest match of a pattern of the form `[...]*`; may be empty."""
        parts: list[str] = []
        while True:
            match = pattern.match(self.text, self.at)
            if match is not None and match.end() > self.at:
                parts.append(self.advance(match.end()))
            if self.at < len(self.text) or self.final:
                return parts[0] if len(parts) == 1 else "".join(parts)
            yield

    def expect(self, candidates: Markers) -> Steps[str | None]:
        """Read the marker that comes next, None if it is other text. Raises Ended."""
        word = yield from self.comes(candidates)
        if word is not None:
            self.advance(self.at + len(word))
        return word

    def comes(self, candidates: Markers) -> Steps[str | None]:
        """Return the marker that comes next, unread; None if it is other text. Raises Ended."""
        yield from self.peek()
        while True:
            match = candidates.pattern.match(self.text, self.at)
            if match is not None and match.group(1) is None and self.final:
                match = candidates.whole.match(self.text, self.at)
                if match is None:
                    raise Ended
            if match is None:
                return None
            if match.group(1) is None and not self.final:
                yield
                continue
            word = match.group()
            if self._exact and word in self._special_texts and not self._came(match.start()):
                return None
            return word

    def until(
        self, candidates: Markers, emit: Callable[[str], object], *, quotes: bool = False
    ) -> Steps[str | None]:
        """Read up to and including the first of the markers; `emit` gets the text before it.

        quotes: quoted markers are text. Returns None if the text ends without one.
        """
        while True:
            marker = self._search(candidates, emit, quotes)
            if marker is not None:
                return marker
            if self.final:
                return None
            yield

    def through(self, candidates: Markers) -> Steps[tuple[str, str]]:
        """Read up to and including the first marker: (text before it, marker). Raises Ended."""
        parts: list[str] = []
        word = yield from self.until(candidates, parts.append)
        if word is None:
            raise Ended
        return "".join(parts), word

    def _search(
        self, candidates: Markers, emit: Callable[[str], object], quotes: bool
    ) -> str | None:
        text = self.text
        self.steps += 1 + len(text) - self.at
        head = candidates.head.search(text, self.at)
        at = head.start() if head is not None else len(text)
        end = len(text)
        pattern = candidates.whole if self.final else candidates.pattern
        while at < end:
            match = pattern.search(text, at)
            if match is None:
                break
            if not self.final and match.group(1) is None:
                end = match.start()
                break
            real = self.is_real(match.group(), match.start(), match.end(), quotes)
            if real is None:
                end = match.start()
                break
            self._spelled += not real
            if real:
                if match.start() > self.at:
                    emit(self.advance(match.start()))
                return self.advance(match.end())
            at = match.end()
        if end > self.at:
            emit(self.advance(end))
        return None

    def is_real(self, word: str, start: int, end: int, quotes: bool) -> bool | None:
        """Whether a marker is not prose; None if more text must decide."""
        if self._exact and word in self._special_texts:
            return self._came(start)
        if not quotes or start == 0 or self.text[start - 1] not in _QUOTES:
            return True
        quote = self.text[start - 1]
        if start > 1 and self.text[start - 2] not in _OPENERS:
            return True
        if quote == "`":
            return False
        if end >= len(self.text):
            return True if self.final else None
        return self.text[end] != quote

    def _came(self, start: int) -> bool:
        """Whether the marker at this index of `text` arrived as a single token."""
        position = self._base + start
        while self._real and self._real[0] < position:
            self._real.popleft()
        return bool(self._real) and self._real[0] == position
