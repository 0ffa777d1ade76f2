"""Ends outputs that repeat themselves, as vLLM's `repetition_detection` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from modulm.contracts.sampling import SamplingParams

__all__ = ["Repetition", "problem_of", "repetition_of"]

#: Bounds the work per token and the tokens that are compared.
MAX_PATTERN = 1_024
MAX_COUNT = 1_024
_KEYS = ("max_pattern_size", "min_pattern_size", "min_count")


@frozen
class Repetition:
    """Patterns of `smallest` to `largest` tokens end an output when its last `count` patterns are
    equal. `start`: tokens before which nothing ends it (min_tokens).
    """

    smallest: int
    largest: int
    count: int
    start: int

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the output ends with a repeated pattern."""
        if len(tokens) < self.start:
            return False
        last = tokens[-1]
        for size in range(self.smallest, min(self.largest, len(tokens) // self.count) + 1):
            if tokens[-1 - size] == last and self._repeats(tokens, size):
                return True
        return False

    def _repeats(self, tokens: Sequence[int], size: int) -> bool:
        """Whether each of the last tokens is the one `size` tokens before it."""
        first = len(tokens) - size * self.count
        return tokens[first + size :] == tokens[first:-size]


def repetition_of(params: SamplingParams) -> Repetition | None:
    """The detection that checked parameters ask for."""
    table = params.repetition_detection or {}
    largest = table.get("max_pattern_size", 0)
    if not largest:
        return None
    smallest = max(1, table.get("min_pattern_size", 0))
    return Repetition(smallest, largest, table["min_count"], params.min_tokens)


def problem_of(value: Any) -> str | None:
    """What is wrong with `repetition_detection`, or None."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "must be an object with max_pattern_size, min_pattern_size and min_count"
    for key, number in value.items():
        if key not in _KEYS:
            return f"has no key {key!r:.40}; it has {', '.join(_KEYS)}"
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            return f"needs an integer of 0 or more as {key}"
    largest = value.get("max_pattern_size", 0)
    if largest > MAX_PATTERN:
        return f"has a max_pattern_size of more than {MAX_PATTERN}"
    if value.get("min_pattern_size", 0) > largest:
        return "needs a max_pattern_size of min_pattern_size or more"
    if largest and not 2 <= value.get("min_count", 0) <= MAX_COUNT:
        return f"needs a min_count from 2 to {MAX_COUNT}"
    return None
