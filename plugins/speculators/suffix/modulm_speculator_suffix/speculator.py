"""Draft the tokens that most often followed a row's last tokens, in the row and in earlier answers.

Like SuffixDecoding (Oliaro et al., arXiv 2411.04975). Instead of a suffix tree, the positions of
each pair of tokens are stored and narrowed down to the longest match. A row that copies a text is
followed there without a search, also past tokens that it changes. Where nothing else is likely, the
last token alone is looked up.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import define, field, frozen

from modulm.contracts.drafter import DraftStep
from modulm.errors import ConfigError
from modulm_speculation import Options, Speculator
from modulm_speculation.speculator import Branch
from modulm_speculator_suffix.records import Records

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model

__all__ = ["Answers", "Earlier", "Suffix", "SuffixOptions"]

#: Separates answers; not a token id.
_EDGE = -1
#: Maximum positions compared; the latest are used.
_PLACES = 128
#: Matching tokens before a change from which on the row is taken to copy the text.
_COPIES = 4
#: Changed tokens in a row until it no longer is, and tokens among which the copy may go on.
_CHANGES, _WINDOW = 6, 12
#: Lengths of matches whose drafts are counted apart, and the class of those after a change.
_LENGTHS = (2, 4, 8)
_CHANGED = len(_LENGTHS) + 1
#: Shares of right drafts that classes of drafts from records end at. Such drafts are used from the
#: first one on, if fewer of those from copied texts were right.
_SHARES = (0.3, 0.7, 0.9)
#: Classes of drafts from records whose last one was wrong, and of those that follow one token.
_MISSED = _CHANGED + len(_SHARES) + 1
_SINGLE = _MISSED + 1
#: A token that occurs more often is not looked up alone; maximum drafts that follow one token.
_COMMON, _AFTER_ONE = 16, 8
#: Index in `_Row.rights` of the ways to go on where the text is no longer copied.
_COPY, _RECORD, _ONE = range(3)
#: Weight of the last first draft in `_Row.rights`.
_LAST = 0.2
#: Weight of the last token in the share of right drafts.
_NEW = 0.08
#: Branches beside a row's drafts, and their longest length.
_BRANCHES, _BRANCH = 4, 8
_NONE = np.zeros(0, dtype=np.int64)
#: Maximum cache salts whose answers are stored, and maximum tokens of all of them: a token takes 70
#: to 250 bytes.
_SALTS, _HELD = 64, 1 << 20


@frozen
class SuffixOptions(Options):
    """Options of suffix decoding.

    suffix_decoding_max_tree_depth: maximum tokens compared. ..._max_cached_requests: earlier
    answers stored, 0 for none. ..._max_spec_factor: maximum drafts per matching token.
    ..._min_token_prob: minimum share of the matches, for a draft and all before it. trees: draft
    several continuations at once; attention needs masks.
    """

    num_speculative_tokens: int = 16
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 1000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    trees: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        least = {
            "suffix_decoding_max_tree_depth": 2,
            "suffix_decoding_max_cached_requests": 0,
            "suffix_decoding_max_spec_factor": 0,
        }
        for option, bound in least.items():
            if getattr(self, option) < bound:
                raise ConfigError(option, f"at least {bound}")
        if not 0 <= self.suffix_decoding_min_token_prob <= 1:
            raise ConfigError("suffix_decoding_min_token_prob", "from 0 to 1")


class Answers:
    """Token ids of several texts, concatenated, and the positions of each pair of tokens."""

    def __init__(self) -> None:
        self._tokens = array("q", [_EDGE])
        self._places: dict[tuple[int, int], array[int]] = {}

    def __len__(self) -> int:
        """Number of tokens, separators included."""
        return len(self._tokens) - 1

    def tokens(self, start: int) -> list[int]:
        """Return the tokens from `start` on."""
        return self._tokens[start + 1 :].tolist()

    def after(self, place: int, count: int) -> list[int]:
        """Return at most `count` tokens of one text after a position. At the end of all texts, what
        follows the position repeats.
        """
        tokens = self._tokens[place + 1 : place + 1 + count].tolist()
        if _EDGE in tokens:
            return tokens[: tokens.index(_EDGE)]
        return (tokens * count)[:count] if len(tokens) < count else tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        texts, places, before = self._tokens, self._places, self._tokens[-1]
        for token in tokens:
            if token != _EDGE and before != _EDGE:
                pair = before, token
                if pair in places:
                    places[pair].append(len(texts))
                else:
                    places[pair] = array("q", (len(texts),))
            texts.append(token)
            before = token

    @property
    def pair(self) -> tuple[int, int]:
        """The last two tokens, or (-1, -1)."""
        return (self._tokens[-2], self._tokens[-1]) if len(self._tokens) > 2 else (_EDGE, _EDGE)

    def has(self, pair: tuple[int, int]) -> bool:
        """Whether the two tokens occur, followed by another token."""
        positions = self._places.get(pair)
        return positions is not None and positions[0] < len(self._tokens) - 1

    def records(self, first: int) -> Records:
        """Return the records of the text from its token `first` on, which copies those before."""
        return Records(self._tokens, self._places, first + 1)

    def places_of(self, token: int) -> np.ndarray:
        """Find the positions of one token that another one follows."""
        return np.flatnonzero(np.frombuffer(self._tokens, dtype=np.int64)[:-1] == token)

    def end(self) -> None:
        """End the current text."""
        self.extend((_EDGE,))

    def places(self, last: Sequence[int]) -> tuple[np.ndarray, int]:
        """Find the longest matches of the end of `last`, token ids.

        Returns (positions of the matches' last tokens, length of the match); no positions unless at
        least two tokens match. A match is followed by a token.
        """
        positions = self._places.get((last[-2], last[-1])) if len(last) > 1 else None
        if positions is None or positions[0] >= len(self._tokens) - 1:
            return _NONE, 0
        matches = np.array(positions[-_PLACES:], dtype=np.int64)
        if matches[-1] == len(self._tokens) - 1:  # the end itself
            matches = matches[:-1]
        if len(matches) == 1:
            return matches, self._common(int(matches[0]), last)
        tokens = np.frombuffer(self._tokens, dtype=np.int64)
        before = matches[:, None] - np.arange(len(last))
        same = tokens[np.maximum(before, 0)] == np.array(last[::-1])  # position 0 matches nothing
        lengths = np.where(same.all(1), len(last), same.argmin(1))
        longest = int(lengths.max())
        return matches[lengths == longest], longest

    def _common(self, place: int, last: Sequence[int]) -> int:
        """Return how many tokens up to a position are the last ones."""
        length = 2
        while length < len(last) and self._tokens[place - length] == last[-1 - length]:
            length += 1
        return length

    def follow(self, places: np.ndarray, count: int, least: float) -> tuple[list[int], int]:
        """Return at most `count` tokens, each the most frequent after the positions matched so far,
        and the last of these positions. least: minimum share of the matches.
        """
        if len(places) == 1:
            return self.after(int(places[0]), count), int(places[0])
        tokens = np.frombuffer(self._tokens, dtype=np.int64)
        ahead = places[:, None] + np.arange(1, count + 1)
        inside = ahead < len(tokens)
        block = np.where(inside, tokens[np.where(inside, ahead, 0)], _EDGE)
        drafts: list[int] = []
        total = len(places)
        while len(drafts) < count:
            index = len(drafts)
            if (block[:, index:] == block[-1, index:]).all():
                rest = block[-1, index:].tolist()
                drafts += rest[: rest.index(_EDGE)] if _EDGE in rest else rest
                break
            column = block[:, index]
            counts = Counter(column.tolist())
            del counts[_EDGE]
            token, most = counts.most_common(1)[0] if counts else (_EDGE, 0)
            if token == _EDGE or most < least * total:
                break
            drafts.append(token)
            left = column == token
            places, block = places[left], block[left]
        return drafts, int(places[-1])


@define(eq=False)
class _Row:
    """A row's own text. length: of its prompt. salt: selects the earlier answers it may use.

    text, place: what it copies, and the position there of its last token. same: how many tokens
    before are the same; a change halves it. changed: how many were changed in a row, from `start`
    on, until the next two are the same (`since`). share: of the latest tokens, how many followed in
    the copied text. rights: of the first drafts where the text is no longer copied, how many were
    right, by way to go on. guesses: these drafts of the next step, -1 for none.
    """

    own: Answers
    length: int
    salt: str | None
    records: Records
    text: Answers | None = None
    place: int = 0
    same: int = 0
    changed: int = 0
    since: int = 0
    start: int = 0
    share: float = 0.0
    rights: list[float] = field(factory=lambda: [0.5, 0.5, 0.5])
    guesses: list[int] = field(factory=list)

    def judge(self, token: int) -> None:
        """Compare the guesses with the token that came."""
        for way, guess in enumerate(self.guesses):
            if guess >= 0:
                self.rights[way] += _LAST * ((guess == token) - self.rights[way])
        self.guesses.clear()

    def advance(self, tokens: Iterable[int]) -> None:
        """Move on in the copied text by the row's new tokens."""
        for token in tokens:
            self.share -= _NEW * self.share
            if self.text is None:
                continue
            following = self.text.after(self.place, 1)
            if following == [token]:
                self.share += _NEW
                self.place, self.same, self.since = self.place + 1, self.same + 1, self.since + 1
                if self.since >= 2:
                    self.changed = 0
            elif not following or self._is_lost():
                self.text = None
            else:
                self.place = self._align(self.text, token)
                self.same, self.since, self.changed = self.same // 2, 0, self.changed + 1

    def _align(self, text: Answers, token: int) -> int:
        """Return the place in the copied text of a token that does not follow there: in place of
        the one that does, or that of a token behind the first change.
        """
        expected = self.place + 1
        if not self.changed:
            self.start = expected
            return expected
        near = text.after(self.start - 1, _WINDOW)
        found = [self.start + index for index, each in enumerate(near) if each == token]
        return min(found, key=lambda place: abs(place - expected), default=expected)

    def _is_lost(self) -> bool:
        return self.changed >= _CHANGES or not (self.changed or self.same >= _COPIES)


class Earlier:
    """Earlier answers: at least the last `count`, or of half as many tokens as may be held, and
    fewer than twice as many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._new, self._old = Answers(), Answers()
        self._held = 0

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._new) + len(self._old)

    @property
    def texts(self) -> tuple[Answers, Answers]:
        """Return the newer and the older answers."""
        return self._new, self._old

    def add(self, tokens: Iterable[int]) -> None:
        """Add an answer."""
        if self._held == self._count or 2 * len(self._new) >= _HELD:
            self._new, self._old, self._held = Answers(), self._new, 0
        self._new.extend(tokens)
        self._new.end()
        self._held += 1


class Suffix(Speculator):
    """Drafts from the row's own text and from earlier answers with the same cache salt."""

    name: ClassVar[str] = "suffix"
    Config: ClassVar[type] = SuffixOptions
    cheap: ClassVar[bool] = True
    preference: ClassVar[int] = 10
    classes: ClassVar[int] = _SINGLE + 1

    @classmethod
    def automatic(
        cls, config: EngineConfig, checkpoint: Checkpoint, family: type[Model]
    ) -> Mapping[str, Any] | str:
        # How many are verified is chosen by how often drafts of such matches are right.
        return {"suffix_decoding_max_spec_factor": 4.0}

    def __init__(self, config: SuffixOptions) -> None:
        super().__init__(config)
        self._options = config
        self._rows: dict[int, _Row] = {}
        self._earlier: OrderedDict[str | None, Earlier] = OrderedDict()
        self._classes: list[int] = []
        self.trees = config.trees
        #: Of the last proposal: branches by row; of the row being looked at: other continuations.
        self._branches: list[Sequence[Branch]] = []
        self._others: list[list[int]] = []

    def admit(self, row: int, prompt: int, salt: str | None) -> None:
        own = Answers()
        self._rows[row] = _Row(own, prompt, salt, own.records(prompt))

    def release(self, row: int) -> None:
        gone = self._rows.pop(row, None)
        count = self._options.suffix_decoding_max_cached_requests
        if gone is None or not count:
            return
        earlier = self._earlier.setdefault(gone.salt, Earlier(count))
        self._earlier.move_to_end(gone.salt)
        earlier.add(gone.own.tokens(gone.length))
        while len(self._earlier) > 1 and (
            len(self._earlier) > _SALTS or sum(map(len, self._earlier.values())) > _HELD
        ):
            self._earlier.popitem(last=False)

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        self._classes.clear()
        self._branches = []
        return [
            self._of(self._rows[row], history, most)
            for row, history, most in zip(step.rows, step.histories, step.most, strict=True)
        ]

    def classes_of_drafts(self) -> Sequence[int]:
        return self._classes

    def branches(self) -> Sequence[Sequence[Branch]]:
        return self._branches

    def _of(self, row: _Row, history: np.ndarray, most: int) -> np.ndarray:
        self._others = []
        drafts = self._best(row, history, most)
        if self.trees:
            self._branches.append(_branches(drafts, self._others) if drafts else ())
        return np.array(drafts, dtype=np.int64) if drafts else _NONE

    def _best(self, row: _Row, history: np.ndarray, most: int) -> list[int]:
        """Return the most likely continuation of a row, and keep others in `_others`."""
        before = len(row.own)
        new = history[before:].tolist()
        row.own.extend(new)
        if new:
            row.judge(new[0])
        row.advance(new)
        row.records.advance(new[max(row.length - before, 0) :])
        depth = self._options.suffix_decoding_max_tree_depth
        drafts: list[int] = []
        if row.text is None or row.same < depth:
            drafts = self._search(row, history, most)
        if not drafts and row.text is not None:
            drafts = row.text.after(row.place, self._count(row, most))
        records, missed = row.records, row.records.missed
        first = records.first() if missed else -1
        row.guesses = [drafts[0] if drafts and row.changed else -1, first, -1]
        copied = (row.rights[_COPY] if row.changed else row.share) if drafts else 0.0
        repeated = records.share if records.share > _SHARES[0] else 0.0
        if missed:
            repeated = row.rights[_RECORD] if first >= 0 else 0.0
        if (missed or not repeated) and (row.changed or not drafts):
            single = self._after_one(row, most)
            if single and row.rights[_ONE] >= max(copied, repeated):
                self._classes.append(_SINGLE)
                self._others.insert(0, drafts)
                return single
            self._others.insert(0, single)
        found = records.draft(most) if repeated > copied else []
        if found and found != drafts[: len(found)]:
            share = _CHANGED + bisect_left(_SHARES, repeated)
            self._classes.append(_MISSED if missed else share)
            self._others.insert(0, drafts)
            return found
        if self.trees:
            self._others.insert(0, row.records.draft(most))
        self._classes.append(_CHANGED if row.changed else bisect_left(_LENGTHS, row.same))
        return drafts

    def _after_one(self, row: _Row, most: int) -> list[int]:
        """Draft what follows the last token elsewhere in the row, if it is not too common."""
        places = row.own.places_of(row.own.pair[1])
        if not 0 < len(places) <= _COMMON or len(row.own) < 2:
            return []
        drafts, place = row.own.follow(places, min(most, _AFTER_ONE), 0.0)
        if row.text is None:
            row.text, row.place, row.same, row.changed, row.since = row.own, place, 1, 0, 0
        row.guesses[_ONE] = drafts[0] if drafts else -1
        return drafts

    def _search(self, row: _Row, history: np.ndarray, most: int) -> list[int]:
        """Draft from the longest match, if it is longer than that with the copied text."""
        earlier, pair = self._earlier.get(row.salt), row.own.pair
        texts = (row.own, *(earlier.texts if earlier is not None else ()))
        if not any(text.has(pair) for text in texts):
            return []
        last = history[-self._options.suffix_decoding_max_tree_depth :].tolist()
        found = [(*text.places(last), text) for text in texts]
        places, length, text = max(found, key=lambda each: each[1])
        if not length or (row.text is not None and row.same >= length):
            return []
        row.text, row.same, row.changed, row.since = text, length, 0, 0
        least = self._options.suffix_decoding_min_token_prob
        count = self._count(row, most)
        drafts, row.place = text.follow(places, count, least)
        if self.trees:
            self._others += [text.after(place, count) for place in places[::-1].tolist()]
        return drafts

    def _count(self, row: _Row, most: int) -> int:
        """Return how many tokens to draft."""
        factor = self._options.suffix_decoding_max_spec_factor
        return min(most, int(max(row.same, 2) * factor))


def _branches(drafts: Sequence[int], others: Iterable[Sequence[int]]) -> list[Branch]:
    """Return the continuations that leave the drafts somewhere, the first of each place."""
    found: dict[tuple[int, int], Branch] = {}
    for tokens in others:
        depth = 0
        while depth < min(len(tokens), len(drafts)) and tokens[depth] == drafts[depth]:
            depth += 1
        if depth < min(len(tokens), len(drafts)) and len(found) < _BRANCHES:
            branch = np.array(tokens[depth : depth + _BRANCH], dtype=np.int64)
            found.setdefault((depth, tokens[depth]), (depth, branch))
    return list(found.values())
