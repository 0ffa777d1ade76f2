"""Follow an answer that copies values of its prompt into a form that repeats, such as a table that
becomes JSON.

Each token of the answer is linked to the token of the prompt that it copies, if there is one. The
next record is drafted from the one before it: what was not copied is repeated, and where a value
was copied, the next one comes from the same distance behind the last copied token. A value ends
where its text in the prompt goes on with what followed the earlier value there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

__all__ = ["Records"]

#: Tokens of the prompt behind the last copied one among which a copied token is looked for.
_AHEAD = 24
#: Wrong drafts in a row after which the earlier record is given up.
_MISSES = 8
#: Weight of the last token in the share of right drafts.
_NEW = 0.08

State = tuple[int, int]


class Records:
    """The links of a row's answer, and where the answer is in an earlier record.

    tokens: prompt and answer, changed by the owner; token ids from 1 on. places: positions of each
    pair of tokens in them. first: position of the answer's first token. `share`: of the latest
    drafts, how many were right.
    """

    def __init__(
        self, tokens: array[int], places: Mapping[tuple[int, int], array[int]], first: int
    ) -> None:
        self._tokens, self._places, self._first = tokens, places, first
        #: By token of the answer: position of the last copied token up to it, whether it is copied
        #: itself, and the index of its value in `_ends`, the positions where values end.
        self._sources = array("q")
        self._copied = bytearray()
        self._values = array("q")
        self._ends = array("q")
        #: Position in the earlier record, 0 without one, and of the last copied token.
        self._place = self._source = 0
        self._misses = 0
        self.share = 0.0

    def __len__(self) -> int:
        """Number of tokens of the answer."""
        return len(self._copied)

    def draft(self, count: int) -> list[int]:
        """Return at most `count` tokens that follow if the earlier record is repeated."""
        drafts: list[int] = []
        place, source = self._place, self._source
        while place and len(drafts) < count:
            token, place, source = self._next(place, source)
            if place:
                drafts.append(token)
        return drafts

    @property
    def missed(self) -> bool:
        """Whether the last token is not the one that was drafted."""
        return self._misses > 0

    def first(self) -> int:
        """Return the first token of `draft`, -1 if there is none."""
        return self._next(self._place, self._source)[0] if self._place else -1

    def advance(self, tokens: Iterable[int]) -> None:
        """Add tokens of the answer, which `tokens` of the row has already."""
        for token in tokens:
            self._add(token)

    def _add(self, token: int) -> None:
        position, texts = self._first + len(self), self._tokens
        linked = bool(self._copied) and self._copied[-1] == 1
        source = self._source
        expected = self._next(self._place, source) if self._place else (-1, 0, 0)
        copied = 0
        if expected[1] and expected[0] == token:
            self._place = expected[1]
            copied = expected[2] if expected[2] != source else 0
            self._misses = 0
            self.share += _NEW * (1.0 - self.share)
        else:
            if source:
                copied = self._find(token, linked)
            elif position > 1 and texts[position - 1] >= 0:
                copied = self._start(position)
            if self._place:
                self.share -= _NEW * self.share
                self._misses += 1
                self._place = self._change(token, expected, linked and copied == source + 1)
            if self._misses or not self._place:
                self._place = self._search(position)
        self._link(copied, linked and copied == source + 1)

    def _link(self, copied: int, goes_on: bool) -> None:
        """Store whether the next token of the answer is copied, and from where."""
        if copied:
            self._source = copied
            if not goes_on:
                self._ends.append(0)
            self._ends[-1] = self._first + len(self._copied)
        self._values.append(len(self._ends) - 1)
        self._sources.append(self._source)
        self._copied.append(1 if copied else 0)

    def _next(self, place: int, source: int) -> tuple[int, int, int]:
        """Return the token after a position in the earlier record, its position there and that of
        the last copied token; position 0 at the end.
        """
        texts, at = self._tokens, place - self._first
        following = at + 1
        if self._copied[at]:
            value = self._values[at]
            end = self._ends[value] - self._first
            goes_on = end > at
            if source + 1 < self._first:
                token = texts[source + 1]
                if token != texts[self._sources[end] + 1]:
                    return token, place + 1 if goes_on else place, source + 1
            following = end + 1
        if following >= len(self._copied):
            return -1, 0, source
        position = self._first + following
        if self._copied[following] and following:
            moved = source + self._sources[following] - self._sources[following - 1]
            if 0 < moved < self._first:
                return texts[moved], position, moved
        return texts[position], position, source

    def _change(self, token: int, expected: tuple[int, int, int], goes_on: bool) -> int:
        """Return the place in the earlier record after a token that was not expected there.

        goes_on: whether the token is the next one of the value that is being copied.
        """
        if self._misses > _MISSES:
            return 0
        at = self._place - self._first
        if self._copied[at]:
            end = self._ends[self._values[at]]
            if goes_on:
                return end
            if end - self._first + 1 < len(self) and self._tokens[end + 1] == token:
                return end + 1
        return expected[1] or self._place

    def _find(self, token: int, linked: bool) -> int:
        """Return the position in the prompt that a token is taken to be copied from, or 0."""
        begin = self._source + 1
        end = min(begin + _AHEAD, self._first)
        if linked and begin < end and self._tokens[begin] == token:
            return begin
        try:
            return self._tokens.index(token, begin, end)
        except ValueError:
            return 0

    def _start(self, position: int) -> int:
        """Return the first position in the prompt of the last two tokens, or 0."""
        found = self._places.get((self._tokens[position - 1], self._tokens[position]))
        return found[0] if found is not None and found[0] < self._first else 0

    def _search(self, position: int) -> int:
        """Return the place in the answer of the last two tokens: the next behind the current place,
        or without one the last; or the current place.
        """
        pair = self._tokens[position - 1], self._tokens[position]
        found = self._places.get(pair)
        if found is None or position - 1 < self._first:
            return self._place
        earlier = [place for place in found[-16:] if self._first < place < position]
        if not earlier:
            return self._place
        if not self._place:
            return earlier[-1] if self._sources[earlier[-1] - self._first] else 0
        return min(earlier, key=lambda place: abs(place - self._place))
