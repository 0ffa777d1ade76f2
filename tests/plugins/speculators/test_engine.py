"""Speculators chosen by flags, beside a real model: the same answers in fewer steps."""

from __future__ import annotations

import pytest

from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm_frontend.validation import problem

FIXED = {"adaptive": False, "num_speculative_tokens": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
#: The embedded model goes on with what repeats itself.
PROMPTS = [[5, 6, 7, 8, 9, 10] * 20]


def answers(*params: SamplingParams, **flags: object) -> list[tuple]:
    """For each of `params` the tokens of all prompts, and how many steps they took."""
    results = []
    with LLM("demo", max_model_len=256, num_gpu_blocks_override=60, **flags) as llm:
        gauges = llm._core.loop.scheduler.gauges
        for each in params:
            steps = gauges().step
            requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs = llm.generate(requests, each, use_tqdm=False)
            tokens = [output.outputs[0].token_ids for output in outputs]
            results.append((tokens, gauges().step - steps))
    return results


def test_the_same_answers_in_fewer_steps() -> None:
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=2)
    plain = answers(GREEDY, sampled, GREEDY)
    for method in ("ngram", "suffix"):
        results = answers(GREEDY, sampled, GREEDY, speculative_config={"method": method, **FIXED})
        assert [tokens for tokens, _ in results] == [tokens for tokens, _ in plain]
        assert results[0][1] < 0.7 * plain[0][1]


def test_how_much_is_drafted_changes_no_answer() -> None:
    plain, drafted = (
        answers(GREEDY),
        answers(GREEDY, spec_method="ngram", spec_tokens=3),
    )
    assert plain[0][0] == drafted[0][0]


def test_a_request_may_ask_for_less() -> None:
    params = [GREEDY, GREEDY.with_(speculative=1), GREEDY.with_(speculative=False)]
    results = answers(*params, speculative_config={"method": "ngram", **FIXED})
    (most, some, none) = (steps for _, steps in results)
    assert most < some < none
    assert results[0][0] == results[1][0] == results[2][0]
    assert none == answers(GREEDY)[0][1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"spec_method": "nope"}, "method: no installed plugin provides speculator 'nope'"),
        ({"spec_tokens": 3}, "method: must be the name of a drafter"),
        ({"speculative_config": {"method": "ngram", "lookup": 3}}, "lookup"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 65}}, "from 1 to 64"),
        (
            {"speculative_config": {"method": "ngram", "adaptive": 3}},
            "adaptive: must be true or false",
        ),
        (
            {"speculative_config": {"method": "ngram"}, "spec_method": "suffix"},
            "'ngram' or 'suffix'",
        ),
    ],
)
def test_what_no_speculator_takes(flags, message) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **flags)


def test_a_request_with_a_wrong_number() -> None:
    assert problem("speculative", -1) == "must be an integer of at least 0"
    assert [SamplingParams(speculative=s).speculative for s in (True, False, 2)] == [None, 0, 2]
