"""DRY, "don't repeat yourself" (https://github.com/oobabooga/text-generation-webui/pull/5677).

A token that would extend a repetition to more than `dry_allowed_length` tokens is penalized by
`dry_multiplier * dry_base ** (length - dry_allowed_length)`. Only the last `dry_penalty_last_n`
tokens of prompt and answer are searched, and repetitions end at sequence breakers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import field, frozen

from modulm.contracts.sampling import RowView
from modulm.errors import RequestError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_samplers import SettingsProcessor, number
from modulm_tokenizers.tokenizer import open_tokenizer

if TYPE_CHECKING:
    import torch

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["Dry", "repetitions"]

_BREAKERS = ("\n", ":", '"', "*")
#: Limits of the list of sequence breakers, and of the penalty's exponent.
_MOST, _LONGEST, _LARGEST = 64, 64, 80.0


def _breakers(value: Any) -> tuple[str, ...]:
    valid = isinstance(value, list | tuple) and len(value) <= _MOST
    if not valid or not all(isinstance(text, str) and 0 < len(text) <= _LONGEST for text in value):
        raise RequestError(
            f"dry_sequence_breakers must be at most {_MOST} texts of 1 to {_LONGEST} characters",
            "dry_sequence_breakers",
        )
    return tuple(value)


@frozen(kw_only=True)
class _Settings:
    """dry_multiplier: 0 turns it off. dry_penalty_last_n: -1 for all tokens, 0 for none."""

    dry_multiplier: float = number(0.0, least=0, most=100)
    dry_base: float = number(1.75, least=1, most=100)
    dry_allowed_length: int = number(2, least=1, most=2**31 - 1, whole=True)
    dry_penalty_last_n: int = number(-1, least=-1, most=2**31 - 1, whole=True)
    dry_sequence_breakers: tuple[str, ...] = field(default=_BREAKERS, converter=_breakers)

    @property
    def active(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0


class Dry(SettingsProcessor[_Settings]):
    """Penalizes tokens that would continue a repetition, before the temperature is applied."""

    settings = _Settings

    def __init__(
        self, vocabulary: int, device: torch.device, texts: _TokenTexts | None = None
    ) -> None:
        super().__init__(vocabulary, device)
        self._texts = texts
        self._breaking: dict[int, np.ndarray] = {}

    @classmethod
    def open(cls, config: EngineConfig, vocabulary: int, device: torch.device) -> Self:
        return cls(vocabulary, device, _TokenTexts(config, vocabulary))

    @property
    def keeps_argmax(self) -> bool:
        return False

    def admit(self, view: RowView) -> bool:
        if not super().admit(view):
            return False
        texts = self.rows[view.row].dry_sequence_breakers
        breaking = np.zeros(self.vocabulary, dtype=bool)
        if texts and self._texts is not None:
            breaking = self._texts.containing(texts)
        self._breaking[view.row] = breaking
        return True

    def release(self, row: int) -> None:
        super().release(row)
        self._breaking.pop(row, None)

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        import torch

        settings = self.rows[view.row]
        last_n = settings.dry_penalty_last_n
        tokens = np.concatenate([np.asarray(view.prompt), np.asarray(view.output)])
        tokens = tokens.astype(np.int64)[0 if last_n < 0 else -last_n :]
        lengths = repetitions(tokens, self._breaking[view.row])
        allowed = settings.dry_allowed_length
        long = {token: length for token, length in lengths.items() if length >= allowed}
        if not long:
            return logits
        steepness = math.log(settings.dry_base)
        penalties = [
            settings.dry_multiplier * math.exp(min(steepness * (length - allowed), _LARGEST))
            for length in long.values()
        ]
        at = torch.tensor(list(long), device=logits.device)
        logits[at] -= torch.tensor(penalties, dtype=logits.dtype, device=logits.device)
        return logits


def repetitions(tokens: np.ndarray, breaking: np.ndarray) -> dict[int, int]:
    """Map each token to the length of the longest suffix of `tokens` that it followed earlier.

    tokens: [n] int64. breaking: [vocabulary] bool, tokens at which a repetition ends.
    """
    lengths: dict[int, int] = {}
    end = len(tokens) - 1
    if end < 1 or breaking[tokens[end]]:
        return lengths
    places = np.flatnonzero(tokens[:end] == tokens[end])
    length = 1
    while len(places):
        following = tokens[places + length]
        for token in np.unique(following[~breaking[following]]).tolist():
            lengths[token] = length
        before = end - length
        if before < 0 or breaking[tokens[before]]:
            break
        places = places[places > 0] - 1
        places = places[tokens[places] == tokens[before]]
        length += 1
    return lengths


class _TokenTexts:
    """The texts of all tokens, decoded on first use (half a second for 150,000)."""

    def __init__(self, config: EngineConfig, vocabulary: int) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._texts: list[str] | None = None
        self._known: dict[tuple[str, ...], np.ndarray] = {}

    def containing(self, breakers: Sequence[str]) -> np.ndarray:
        """Find the tokens whose text contains a breaker: [vocabulary] bool."""
        key = tuple(sorted(set(breakers)))
        with self._lock:
            if key not in self._known:
                if self._texts is None:
                    self._texts = _texts_of(self._tokenizer(), self._vocabulary)
                if len(self._known) >= _MOST:
                    self._known.clear()
                matches = [any(one in text for one in key) for text in self._texts]
                self._known[key] = np.array(matches)
            return self._known[key]

    def _tokenizer(self) -> Tokenizer:
        checkpoint = open_checkpoint(self._config, manager.current())
        tokenizer = open_tokenizer(self._config, str(checkpoint.path))
        if tokenizer is None:
            message = "dry_sequence_breakers need a tokenizer; send an empty list"
            raise RequestError(message, "dry_sequence_breakers")
        return tokenizer


def _texts_of(tokenizer: Tokenizer, vocabulary: int) -> list[str]:
    size = min(vocabulary, len(tokenizer))
    texts = [tokenizer.decode([index], skip_special_tokens=False) for index in range(size)]
    return texts + [""] * (vocabulary - size)
