"""Draft the tokens that most often followed a row's last tokens, in the row and in earlier answers.

Like SuffixDecoding (Oliaro et al., arXiv 2411.04975). Instead of a suffix tree, the positions of
each pair of tokens are stored and narrowed down to the longest match.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from modulm.contracts.drafter import DraftStep
from modulm.errors import ConfigError
from modulm_speculation import Options, Speculator

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model

__all__ = ["Answers", "Earlier", "Suffix", "SuffixOptions", "follow"]

#: Separates answers; not a token id.
_EDGE = -1
#: Maximum positions compared; the latest are used.
_PLACES = 512
#: Maximum cache salts whose answers are stored.
_SALTS = 64


@frozen
class SuffixOptions(Options):
    """Options of suffix decoding.

    suffix_decoding_max_tree_depth: maximum tokens compared. ..._max_cached_requests: earlier
    answers stored, 0 for none. ..._max_spec_factor: maximum drafts per matching token.
    ..._min_token_prob: minimum share of the matches, for a draft and all before it.
    """

    num_speculative_tokens: int = 16
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 1000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        least = {
            "suffix_decoding_max_tree_depth": 2,
            "suffix_decoding_max_cached_requests": 0,
            "suffix_decoding_max_spec_factor": 0,
        }
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ConfigError(field, f"at least {bound}")
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

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            before = self._tokens[-1]
            if token != _EDGE and before != _EDGE:
                positions = self._places.setdefault((before, token), array("q"))
                positions.append(len(self._tokens))
            self._tokens.append(token)

    def end(self) -> None:
        """End the current text."""
        self.extend((_EDGE,))

    def has(self, history: np.ndarray) -> bool:
        """Whether the last two tokens of a row occur, followed by another token."""
        if len(history) < 2:
            return False
        positions = self._places.get((int(history[-2]), int(history[-1])))
        return positions is not None and positions[0] < len(self._tokens) - 1

    def places(self, last: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Find the longest matches of the end of `last`, [n] int64.

        Returns (all tokens, positions of the matches' last tokens, length of the match); no
        positions unless at least two tokens match.
        """
        tokens = np.frombuffer(self._tokens, dtype=np.int64)
        positions = self._places.get((int(last[-2]), int(last[-1]))) if len(last) > 1 else None
        if positions is None:
            return tokens, np.zeros(0, dtype=np.int64), 0
        matches = np.array(positions[-_PLACES:], dtype=np.int64)
        matches = matches[matches < len(tokens) - 1]
        length, narrowed = (2 if len(matches) else 0), matches
        while len(narrowed) and length < len(last):
            narrowed = matches[tokens[matches - length] == last[-1 - length]]
            if len(narrowed):
                matches, length = narrowed, length + 1
        return tokens, matches, length


def follow(tokens: np.ndarray, places: np.ndarray, count: int, least: float) -> list[int]:
    """Return at most `count` tokens, each the most frequent after the positions matched so far."""
    drafts: list[int] = []
    total = len(places)
    while len(drafts) < count:
        places = places[places + 1 < len(tokens)] + 1
        following = tokens[places]
        values, counts = np.unique(following[following != _EDGE], return_counts=True)
        if not len(values) or counts.max() < least * total:
            break
        drafts.append(int(values[counts.argmax()]))
        places = places[following == drafts[-1]]
    return drafts


@frozen(eq=False)
class _Row:
    """A row's own text. length: of its prompt. salt: selects the earlier answers it may use."""

    own: Answers
    length: int
    salt: str | None


class Earlier:
    """Earlier answers: at least the last `count`, fewer than twice as many."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._new, self._old = Answers(), Answers()
        self._held = 0

    @property
    def texts(self) -> tuple[Answers, Answers]:
        """Return the newer and the older answers."""
        return self._new, self._old

    def add(self, tokens: Iterable[int]) -> None:
        """Add an answer."""
        if self._held == self._count:
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

    @classmethod
    def automatic(
        cls, config: EngineConfig, checkpoint: Checkpoint, family: type[Model]
    ) -> Mapping[str, Any] | str:
        return {}

    def __init__(self, config: SuffixOptions) -> None:
        super().__init__(config)
        self._options = config
        self._rows: dict[int, _Row] = {}
        self._earlier: OrderedDict[str | None, Earlier] = OrderedDict()

    def admit(self, row: int, prompt: int, salt: str | None) -> None:
        self._rows[row] = _Row(Answers(), prompt, salt)

    def release(self, row: int) -> None:
        gone = self._rows.pop(row, None)
        count = self._options.suffix_decoding_max_cached_requests
        if gone is None or not count:
            return
        earlier = self._earlier.setdefault(gone.salt, Earlier(count))
        self._earlier.move_to_end(gone.salt)
        if len(self._earlier) > _SALTS:
            self._earlier.popitem(last=False)
        earlier.add(gone.own.tokens(gone.length))

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        return [
            self._of(self._rows[row], history, most)
            for row, history, most in zip(step.rows, step.histories, step.most, strict=True)
        ]

    def _of(self, row: _Row, history: np.ndarray, most: int) -> np.ndarray:
        row.own.extend(history[len(row.own) :].tolist())
        earlier = self._earlier.get(row.salt)
        texts = (row.own, *(earlier.texts if earlier is not None else ()))
        texts = tuple(text for text in texts if text.has(history))
        if not texts:
            return history[:0]
        last = history[-self._options.suffix_decoding_max_tree_depth :]
        tokens, places, length = max((text.places(last) for text in texts), key=lambda f: f[2])
        count = min(most, int(length * self._options.suffix_decoding_max_spec_factor))
        least = self._options.suffix_decoding_min_token_prob
        return np.array(follow(tokens, places, count, least), dtype=np.int64)
