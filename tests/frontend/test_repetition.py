"""Outputs that repeat themselves end: `repetition_detection`."""

from __future__ import annotations

from typing import Any

import pytest

from modulm.contracts.sampling import SamplingParams
from modulm.errors import RequestError
from modulm_frontend.repetition import repetition_of
from modulm_frontend.validation import check


def ended(tokens: list[int], min_tokens: int = 0, **table: int) -> int | None:
    """The number of tokens after which the output ends."""
    repetition = repetition_of(
        SamplingParams(repetition_detection=table, min_tokens=min_tokens, max_tokens=99)
    )
    assert repetition is not None
    counts = range(1, len(tokens) + 1)
    return next((count for count in counts if repetition.ends(tokens[:count])), None)


def test_patterns_within_the_sizes_end_it() -> None:
    tokens = [9, 8, 1, 2, 1, 2, 1, 2, 1]
    assert ended(tokens, max_pattern_size=2, min_count=3) == 8
    assert ended(tokens, max_pattern_size=2, min_pattern_size=2, min_count=2) == 6
    assert ended(tokens, max_pattern_size=1, min_count=2) is None
    assert ended(tokens, max_pattern_size=2, min_count=4) is None
    assert ended([5, 5, 5, 5], max_pattern_size=3, min_count=4) == 4
    assert ended([5] * 12, max_pattern_size=3, min_pattern_size=3, min_count=3) == 9
    assert ended([5] * 9, 7, max_pattern_size=1, min_count=2) == 7


@pytest.mark.parametrize("table", [None, {}, {"max_pattern_size": 0, "min_count": 0}])
def test_nothing_asks_for_nothing(table: Any) -> None:
    assert repetition_of(SamplingParams(repetition_detection=table)) is None


@pytest.mark.parametrize(
    "table",
    [
        5, {"size": 1}, {"max_pattern_size": -1}, {"max_pattern_size": True},
        {"max_pattern_size": 2}, {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 10**6, "min_count": 2}, {"max_pattern_size": 2, "min_count": 10**9},
    ],
)  # fmt: skip
def test_wrong_values_name_the_field(table: Any) -> None:
    params = SamplingParams(repetition_detection=table)
    with pytest.raises(RequestError, match="repetition_detection"):
        check(params, vocabulary=64, max_model_len=64)
