"""Speculators that look drafts up: what they propose."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modulm.contracts.drafter import Drafter, DraftStep
from modulm.errors import ConfigError
from modulm_speculator_ngram.speculator import Ngram, NgramOptions, lookup
from modulm_speculator_suffix.speculator import Answers, Suffix, SuffixOptions


def step(*histories: list[int], most: int = 4, rows: list[int] | None = None) -> DraftStep:
    arrays = [np.array(history, dtype=np.int64) for history in histories]
    return DraftStep(
        rows=rows or list(range(len(arrays))),
        histories=arrays,
        most=[most] * len(arrays),
        batch=SimpleNamespace(tokens=np.zeros(len(arrays))),
        accepted=np.arange(len(arrays)),
    )


def proposed(drafter: Drafter, *histories: list[int], **more: object) -> list[list[int]]:
    return [each.tolist() for each in drafter.propose(step(*histories, **more))]


# ngram


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # the last place, and it repeats
        ([7, 1, 2, 9, 6, 1, 2, 8, 7, 1, 2], [9, 6, 1, 2]),  # more in common goes first
        ([1, 2, 3, 4], []),
        ([4, 1, 5, 1], []),  # one token in common, two are wanted
        ([5, 5, 5], [5, 5, 5, 5]),
        ([5], []),
    ],
)
def test_what_followed_the_last_tokens(history, expected) -> None:
    assert proposed(Ngram(NgramOptions()), history) == [expected]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 3))
def test_the_longest_match_is_found(history, least, more) -> None:
    longest = least + more

    def common(end: int) -> int:
        same = 0
        while same < min(longest, end + 1) and history[end - same] == history[-1 - same]:
            same += 1
        return same

    drafts = lookup(np.array(history), least, longest, 3).tolist()
    best = max(map(common, range(len(history) - 1)), default=0)
    if best < least:
        assert drafts == []
        return
    end = max(end for end in range(len(history) - 1) if common(end) == best)
    whole = [*history[end + 1 :]]
    assert drafts == (whole * 3)[:3]


# suffix


def test_the_most_frequent_one_is_followed() -> None:
    row = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    suffix = Suffix(SuffixOptions(suffix_decoding_max_spec_factor=2))
    suffix.admit(0, 3, None)
    # After 1 2 comes 4 two times of three, then 9 or 8, then what follows the first of them.
    assert proposed(suffix, row)[0][:1] == [4]


def test_earlier_answers_are_used_among_rows_of_one_salt() -> None:
    suffix = Suffix(SuffixOptions(suffix_decoding_max_spec_factor=3))

    def row(number: int, salt: str | None) -> None:
        suffix.admit(number, 1, salt)

    row(0, "a")
    assert proposed(suffix, [0, 5, 6, 7, 8, 9]) == [[]]
    suffix.release(0)
    row(1, "a")
    row(2, "b")
    assert proposed(suffix, [0, 5, 6], [0, 5, 6], rows=[1, 2]) == [[7, 8, 9], []]


def test_a_row_that_starts_again_has_its_text_again() -> None:
    suffix = Suffix(SuffixOptions())
    suffix.admit(3, 3, None)
    first = proposed(suffix, [1, 2, 3, 1, 2], rows=[3])
    suffix.release(3)
    suffix.admit(3, 3, None)
    assert proposed(suffix, [1, 2, 3, 1, 2], rows=[3]) == first


def test_drafts_end_where_an_answer_ended() -> None:
    suffix = Suffix(SuffixOptions(suffix_decoding_max_spec_factor=2))
    for answer in ([5, 6, 7], [5, 6, 7], [1, 2]):
        suffix.admit(0, 1, None)
        suffix.propose(step([0, *answer]))
        suffix.release(0)
    suffix.admit(0, 1, None)
    assert proposed(suffix, [0, 5, 6]) == [[7]]


def test_old_answers_go() -> None:
    suffix = Suffix(SuffixOptions(suffix_decoding_max_cached_requests=3))
    for answer in range(20):
        suffix.admit(0, 1, None)
        suffix.propose(step([0, 100 + answer, 200 + answer, 300 + answer]))
        suffix.release(0)
    suffix.admit(0, 1, None)
    assert proposed(suffix, [0, 119, 219])[0][:1] == [319]
    suffix.release(0)
    suffix.admit(0, 1, None)
    assert proposed(suffix, [0, 101, 201]) == [[]]


def test_tokens_of_earlier_answers_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(f"{Suffix.__module__}._HELD", 64)
    suffix = Suffix(SuffixOptions())
    for answer in range(60):
        salt = f"tenant {answer // 20}"
        suffix.admit(0, 1, salt)
        suffix.propose(step([0, *range(10 * answer, 10 * answer + 5)]))
        suffix.release(0)
        suffix.admit(0, 1, salt)
        assert proposed(suffix, [0, 10 * answer, 10 * answer + 1])[0][:1] == [10 * answer + 2]
        suffix.release(0)
        assert sum(map(len, suffix._earlier.values())) <= 64 + 2 * 6, "and an answer each"
    assert "tenant 0" not in suffix._earlier


@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(1, 5))
def test_places_end_like_the_text(tokens, split) -> None:
    text = Answers()
    text.extend(tokens[:split])
    text.extend(tokens[split:])
    positions, length = text.places(tokens)
    pairs = [end for end in range(2, len(tokens)) if tokens[end - 2 : end] == tokens[-2:]]
    assert bool(len(positions)) == bool(pairs)
    for end in positions.tolist():
        assert tokens[end - length : end] == tokens[-length:]
        assert end < len(tokens)
    for end in pairs:
        assert end in positions or tokens[end - length : end] != tokens[-length:]
    if len(positions):
        drafts, place = text.follow(positions, 4, 0.0)
        assert 0 < len(drafts) <= 4
        assert place in positions


def drafts_per_step(suffix: Suffix, prompt: list[int], answer: list[int]) -> list[list[int]]:
    """The drafts of each step of a row that gives `answer`, until it has ended."""
    suffix.admit(0, len(prompt), None)
    known, drafts = [*prompt, answer[0]], []
    whole = [*prompt, *answer]
    while len(known) < len(whole):
        (draft,) = proposed(suffix, known, most=8)
        drafts.append(draft)
        right = 0
        while right < len(draft) and whole[len(known) : len(known) + 1] == [draft[right]]:
            known.append(draft[right])
            right += 1
        known += whole[len(known) : len(known) + 1]
    suffix.release(0)
    return drafts


def test_a_copy_goes_on_behind_what_is_changed() -> None:
    text = list(range(100, 160))
    edited = [*text[:20], 7, *text[21:40], 8, 9, *text[41:50], *text[53:]]  # 1 for 1, 2 for 1, cut
    suffix = Suffix(SuffixOptions(suffix_decoding_max_spec_factor=4))
    drafts = drafts_per_step(suffix, text, edited)
    assert text[21:29] in drafts, "drafted at once behind the token that was replaced"
    assert len(drafts) <= 16


def test_text_that_repeats_is_drafted_whole() -> None:
    suffix = Suffix(SuffixOptions(suffix_decoding_max_spec_factor=4))
    drafts = drafts_per_step(suffix, [1, 2, 3], [1, 2, 3] * 20)
    assert drafts[-2] == [*drafts[-2][:3]] * 2 + drafts[-2][:2]


def test_one_token_is_followed_where_nothing_else_is_likely() -> None:
    text = list(range(100, 160))
    quotes = [[1, 2, 3, *text[at : at + 6]] for at in (40, 10, 30, 20, 50, 0)]
    suffix = Suffix(SuffixOptions(suffix_decoding_max_spec_factor=4))
    drafts = drafts_per_step(suffix, text, [token for quote in quotes for token in quote])
    assert text[21:27] in [draft[:6] for draft in drafts], "behind the quote's first token"
    assert len(drafts) <= 2 * len(quotes) + 3, "the first tokens of quotes are not known"


def test_a_common_token_is_not_followed_alone() -> None:
    text = [token for at in range(20) for token in (7, 100 + at)]
    suffix = Suffix(SuffixOptions(suffix_decoding_max_spec_factor=4))
    suffix.admit(0, len(text), None)
    assert proposed(suffix, [*text, 50, 7]) == [[]]
    assert proposed(suffix, [*text, 50, 7, 51, 104])[0][:2] == [7, 105]


#: Tokens between the values of a table's rows, and around those of the answer's records.
_COLUMN, _ROW, _KEYS = 1, 2, ([3, 4], [5, 6, 7], [8])


def table(values: list[list[list[int]]]) -> tuple[list[int], list[int]]:
    """A prompt of rows of values, and an answer with a record for each row."""
    prompt, answer = [9], []
    for row in values:
        for index, value in enumerate(row):
            prompt += [*value, _ROW if index == len(row) - 1 else _COLUMN]
            answer += [*_KEYS[index], *value]
    return prompt, answer


def test_records_take_their_values_from_the_next_row_of_the_prompt() -> None:
    draw, fresh = random.Random(0), iter(range(100, 10_000))
    values = [[[next(fresh) for _ in range(draw.randint(2, 5))] for _ in _KEYS] for _ in range(12)]
    prompt, answer = table(values)
    suffix = Suffix(SuffixOptions(suffix_decoding_max_spec_factor=4))
    steps = len(drafts_per_step(suffix, prompt, answer))
    first = sum(map(len, (*values[0], *_KEYS)))
    assert steps < first + (len(answer) - first) / 5, "8 drafts a step once the form is known"
    suffix.admit(1, len(prompt), None)
    known = [*prompt, *answer[: -len(answer) // 3]]
    (draft,) = proposed(suffix, known, rows=[1], most=8)
    assert draft == answer[len(known) - len(prompt) :][:8]


@given(st.lists(st.integers(0, 4), max_size=40), st.lists(st.integers(0, 4), max_size=60))
def test_records_of_any_text(prompt, answer) -> None:
    """Wherever the links point: drafts are tokens of the text, whatever the steps are."""
    whole, text = Answers(), [*prompt, *answer]
    records = whole.records(len(prompt))
    whole.extend(text)
    records.advance(answer[:20])
    for token in answer[20:]:
        assert set(records.draft(6)) <= set(text)
        records.advance([token])
    assert len(records) == len(answer)


def test_classes_are_by_the_length_of_the_match() -> None:
    suffix = Suffix(SuffixOptions())
    suffix.admit(0, 12, None)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    for end, expected in ((2, 0), (3, 1), (4, 1), (5, 2), (9, 3)):
        suffix.propose(step([*text, *text[:end]]))
        assert suffix.classes_of_drafts() == [expected]


@pytest.mark.parametrize(
    ("options", "table", "field"),
    [
        (NgramOptions, {"prompt_lookup_min": 6}, "prompt_lookup_min"),
        (NgramOptions, {"num_speculative_tokens": 0}, "num_speculative_tokens"),
        (SuffixOptions, {"suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth"),
        (SuffixOptions, {"suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob"),
    ],
)
def test_options_out_of_range(options, table, field) -> None:
    with pytest.raises(ConfigError) as error:
        options(**table)
    assert error.value.field == field
