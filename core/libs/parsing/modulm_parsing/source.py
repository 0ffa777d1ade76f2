"""Text that arrives in pieces, for readers that are written as if all of it were there.

A reader is a generator: it asks the source for what comes next, and where that is not certain
yet it yields until more text was pushed. What is certain depends on the text alone and never on
where it was cut; what stays unread is never longer than the longest marker that was looked for,
so that the work is linear in the text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

__all__ = ["Ended", "Markers", "NotACall", "Source", "Steps", "markers"]

T = TypeVar("T")
#: A reader's progress; it yields where more text is needed.
Steps = Generator[None, None, T]

_QUOTES = "`\"'"
_OPENERS = " \t\r\n([{<,;:=-"
_SPACE = re.compile(r"\s*")


class NotACall(Exception):
    """What looked like a region is none; if nothing of it was told yet, it is text."""


class Ended(NotACall):
    """The text has ended inside a region."""


class Markers:
    """Words that text is searched for; the longest one counts where several begin."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = tuple(sorted(set(words), key=len, reverse=True))
        whole = "|".join(re.escape(word) for word in self.words) or r"(?!)"
        begun = "|".join(_beginnings(word) for word in self.words if len(word) > 1) or r"(?!)"
        #: Group 1 is a whole word; a match without it is a beginning at the end of the text.
        self.pattern = re.compile(rf"(?:{begun})\Z|({whole})")
        self.whole = re.compile(f"({whole})")
        heads = "".join(sorted({re.escape(word[0]) for word in self.words}))
        self.head = re.compile(f"[{heads}]" if heads else r"(?!)")


@lru_cache(maxsize=1024)
def markers(*words: str) -> Markers:
    """The words, ready to search for."""
    return Markers(words)


def _beginnings(word: str) -> str:
    """A pattern of every proper beginning of `word`."""
    pattern = ""
    for letter in reversed(word[1:-1]):
        pattern = f"(?:{re.escape(letter)}{pattern})?"
    return re.escape(word[0]) + pattern


class Source:
    """What arrived and was not read yet.

    special: id -> text of the markers that are single tokens of the vocabulary. Where ids are
    known, such a marker counts only where its id came; spelled with other tokens it is prose.
    Where they are not known a marker in quotes (a quote mark opens right before it and the same
    one follows) or behind an opening backtick is prose.

    held: text read since `hold`, which is given back as prose if no call comes of it.
    """

    def __init__(self, special: Mapping[int, str] | None = None) -> None:
        self.text = ""
        self.at = 0
        self.final = False
        self.held: list[str] | None = None
        self.steps = 0  # pieces of work, for tests of linear time
        self._base = 0  # place of text[0] in all that arrived
        self._special = special or {}
        self._words = frozenset(self._special.values())
        self._exact = False  # ids are known
        self._awaited: deque[tuple[str, list[int]]] = deque()
        self._run: list[int] = []  # ids since the last one that is special
        self._real: deque[int] = deque()  # places of markers that came as ids
        self._placed = 0
        self._spelled = 0  # markers read as prose since the last real one
        self.decode: Callable[[list[int]], str] | None = None

    def push(self, text: str, ids: Sequence[int] = ()) -> None:
        """More text, and the ids that it (or text yet to come) was made of."""
        keep = self.at - 2 if self.at > 2 else 0  # two characters tell whether a quote opens
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
        """Find the text of the special tokens that came.

        The same letters spelled with other tokens before one are skipped; how many there are,
        those tokens tell.
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
        """From here on, what is read may have to be given back."""
        self.held = []

    def advance(self, end: int) -> str:
        """Read up to the index `end` of `text`."""
        taken = self.text[self.at : end]
        self.at = end
        if self.held is not None:
            self.held.append(taken)
        return taken

    def back(self, count: int) -> None:
        """Give back the last `count` characters that were read since text was last pushed."""
        self.at -= count

    def over(self) -> Steps[bool]:
        """Whether the text has ended here."""
        while self.at >= len(self.text):
            if self.final:
                return True
            yield
        return False

    def peek(self) -> Steps[str]:
        """The next character, unread. Raises Ended."""
        while self.at >= len(self.text):
            if self.final:
                raise Ended
            yield
        return self.text[self.at]

    def space(self) -> Steps[str]:
        """Read white space, if any."""
        return (yield from self.run(_SPACE))

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the longest run of a pattern of the form `[...]*`; it may be empty."""
        parts: list[str] = []
        while True:
            match = pattern.match(self.text, self.at)
            if match is not None and match.end() > self.at:
                parts.append(self.advance(match.end()))
            if self.at < len(self.text) or self.final:
                return parts[0] if len(parts) == 1 else "".join(parts)
            yield

    def expect(self, words: Markers) -> Steps[str | None]:
        """Read the word that comes now, or None if another text does. Raises Ended."""
        word = yield from self.comes(words)
        if word is not None:
            self.advance(self.at + len(word))
        return word

    def comes(self, words: Markers) -> Steps[str | None]:
        """The word that comes now, unread, or None if another text does. Raises Ended."""
        yield from self.peek()
        while True:
            match = words.pattern.match(self.text, self.at)
            if match is not None and match.group(1) is None and self.final:
                match = words.whole.match(self.text, self.at)
                if match is None:
                    raise Ended
            if match is None:
                return None
            if match.group(1) is None and not self.final:
                yield
                continue
            word = match.group()
            if self._exact and word in self._words and not self._came(match.start()):
                return None
            return word

    def until(
        self, words: Markers, emit: Callable[[str], object], *, quotes: bool = False
    ) -> Steps[str | None]:
        """Read up to and with the first of the words; `emit` gets the text before it.

        quotes: a word in quotes is text. None if the text ends without one.
        """
        while True:
            found = self._search(words, emit, quotes)
            if found is not None:
                return found
            if self.final:
                return None
            yield

    def through(self, words: Markers) -> Steps[tuple[str, str]]:
        """Read up to and with the first of the words: (text before it, word). Raises Ended."""
        parts: list[str] = []
        word = yield from self.until(words, parts.append)
        if word is None:
            raise Ended
        return "".join(parts), word

    def _search(self, words: Markers, emit: Callable[[str], object], quotes: bool) -> str | None:
        text = self.text
        self.steps += 1 + len(text) - self.at
        head = words.head.search(text, self.at)
        at = head.start() if head is not None else len(text)
        end = len(text)
        pattern = words.whole if self.final else words.pattern
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
        """Whether a word is a marker and not prose; None while that is open."""
        if self._exact and word in self._words:
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
        """Whether the marker at this index of `text` came as a token of its own."""
        place = self._base + start
        while self._real and self._real[0] < place:
            self._real.popleft()
        return bool(self._real) and self._real[0] == place
