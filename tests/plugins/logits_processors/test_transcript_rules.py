"""Rules of Whisper's times: tokens 0..9 are text, 10 ends an answer, from 12 on they are times."""

from __future__ import annotations

import pytest
import torch

from modulm.contracts.sampling import RowView, SamplingParams
from modulm.errors import RequestError
from modulm_logits_transcript_rules import TranscriptRules

END, TIMES, VOCABULARY = 10, 12, 20


def allowed(output: list[int], scores: dict[int, float] | None = None, **rules) -> list[int]:
    """The tokens that may come after an output."""
    table = {"end": END, "times": TIMES, "latest": 2, "hidden": [11], **rules}
    params = SamplingParams(extra_args={"transcript_rules": table})
    processor = TranscriptRules(VOCABULARY, torch.device("cpu"))
    TranscriptRules.validate(params)
    view = RowView(0, params, [], output)
    assert processor.admit(view)
    logits = torch.zeros(VOCABULARY)
    # Text is likely, unless a test says otherwise: else the sum over times would win.
    logits[:TIMES] = 5.0
    for token, score in (scores or {}).items():
        logits[token] = score
    masked = processor.apply_row(view, logits)
    processor.release(0)
    return [token for token in range(VOCABULARY) if masked[token] > float("-inf")]


TEXT = list(range(10))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [12, 13, 14]),
        ([12], [*TEXT, END]),
        ([12, 3], [*TEXT, END, *range(13, 20)]),
        ([12, 3, 15], [END, *range(15, 20)]),
        ([12, 3, 15, 15], [*TEXT, END]),
        ([12, 3, 15, 15, 4], [*TEXT, END, *range(16, 20)]),
        ([12, 3, 19, 19, 4], [*TEXT, END]),
    ],
)
def test_times_open_and_close_segments_and_never_go_back(output, expected) -> None:
    assert allowed(output) == expected


def test_a_time_is_written_where_all_together_are_more_probable_than_the_best_text() -> None:
    likely = dict.fromkeys(range(13, 20), 3.5)
    assert allowed([12, 3], likely) == list(range(13, 20))
    assert allowed([12, 3], {**likely, 4: 9.0}) == [*TEXT, END, *range(13, 20)]


def test_without_times_none_is_written() -> None:
    assert allowed([], written=False, hidden_first=[4, END]) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert allowed([3], written=False, hidden_first=[4, END]) == [*TEXT, END]


@pytest.mark.parametrize(
    "table",
    [
        3, {}, {"end": 1}, {"end": 1, "times": -1}, {"end": 1, "times": 2, "hidden": "x"},
        {"end": 1, "times": 2, "hidden": [True]}, {"end": 1, "times": 2, "written": 1},
        {"end": 1, "times": 2, "more": 1}, {"end": 1, "times": 2, "hidden": [0] * 5000},
    ],
)  # fmt: skip
def test_wrong_tables_are_refused(table) -> None:
    with pytest.raises(RequestError, match="transcript_rules"):
        TranscriptRules.validate(SamplingParams(extra_args={"transcript_rules": table}))


def test_tokens_that_the_model_lacks_are_refused_and_rows_without_rules_are_left_alone() -> None:
    processor = TranscriptRules(VOCABULARY, torch.device("cpu"))
    table = {"end": END, "times": VOCABULARY}
    with pytest.raises(RequestError, match="not a token of this model"):
        processor.admit(RowView(0, SamplingParams(extra_args={"transcript_rules": table}), [], []))
    assert not processor.admit(RowView(0, SamplingParams(extra_args={"other": 1}), [], []))


def test_rules_are_those_of_transformers() -> None:
    """Masks of random scores after random answers that keep to the rules."""
    from transformers import GenerationConfig
    from transformers.generation import WhisperTimeStampLogitsProcessor

    settings = GenerationConfig(
        no_timestamps_token_id=TIMES - 1, eos_token_id=END, bos_token_id=END,
        max_initial_timestamp_index=2,
    )  # fmt: skip
    theirs = WhisperTimeStampLogitsProcessor(settings, begin_index=1)
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        output: list[int] = []
        for _ in range(8):
            scores = 3 * torch.randn(VOCABULARY, generator=random)
            scores[TIMES - 1] = float("-inf")
            expected = theirs(torch.tensor([[0, *output]]), scores[None].clone())[0]
            logits = dict(enumerate(scores.tolist()))
            tokens = allowed(output, logits)
            assert tokens == torch.isfinite(expected).nonzero().ravel().tolist(), output
            output.append(int(expected.softmax(-1).multinomial(1, generator=random)))
            if output[-1] == END:
                break
