"""Draft what followed the last occurrence of a row's last tokens (prompt lookup decoding).

Nothing is stored between steps: numpy searches the row's tokens, about one nanosecond per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from attrs import frozen

from modulm.contracts.drafter import DraftStep
from modulm.errors import ConfigError
from modulm_speculation import Options, Speculator

__all__ = ["Ngram", "NgramOptions", "lookup"]


@frozen
class NgramOptions(Options):
    """prompt_lookup_min, prompt_lookup_max: minimum and maximum number of matching tokens."""

    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError("prompt_lookup_min", "from 1 to prompt_lookup_max")


def lookup(history: np.ndarray, least: int, longest: int, count: int) -> np.ndarray:
    """Return `count` tokens that may follow, or none.

    history: [tokens] int64. Of the earlier occurrences of its end, the longest match wins (`least`
    to `longest` tokens), then the latest. If the history ends before `count` tokens, it repeats.
    """
    ends = np.flatnonzero(history[:-1] == history[-1])
    length = 0
    while len(ends):
        length += 1
        matches = ends
        if length == longest:
            break
        ends = ends[ends >= length]
        ends = ends[history[ends - length] == history[-1 - length]]
    if not length or length < least:
        return history[:0]
    start = int(matches[-1]) + 1
    return history[start + np.arange(count) % (len(history) - start)]


class Ngram(Speculator):
    """Drafts what followed the row's last tokens earlier."""

    name: ClassVar[str] = "ngram"
    Config: ClassVar[type] = NgramOptions
    cheap: ClassVar[bool] = True

    def __init__(self, config: NgramOptions) -> None:
        super().__init__(config)
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        return [
            lookup(history, *self._lengths, most)
            for history, most in zip(step.histories, step.most, strict=True)
        ]
