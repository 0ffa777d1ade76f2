"""Every field of a request with values that are wrong: the error names the field."""

from __future__ import annotations

import math

import numpy as np
import pytest

from modulm.contracts.sampling import PoolingParams, SamplingParams, StructuredOutputs
from modulm.errors import ContextLengthExceeded, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_frontend.validation import (
    bad_word_ids,
    check,
    check_pooling,
    check_prompt,
    truncated,
)
from modulm_tokenizers.tokenizer import load_tokenizer

V, CONTEXT = 500, 256


def checked(prompt_len=10, **fields) -> SamplingParams:
    fields = {"max_tokens": 4, **fields}
    return check(
        SamplingParams(**fields),
        vocabulary=V,
        max_model_len=CONTEXT,
        prompt_len=prompt_len,
        max_temperature=2.0,
        max_n=16,
    )


NOT_NUMBERS = ["0.5", True, [], {}, math.nan, math.inf, -math.inf, None]
WRONG = {
    "n": [0, -1, 1.5, True, 17, 10**9, "2"],
    "best_of": [0, 10**9, True],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1, 1e9],
    "temperature": [*NOT_NUMBERS, -0.1, 2.01],
    "top_p": [*NOT_NUMBERS, 0, -1, 1.0001, "1"],
    "top_k": [-2, 1.5, True, None, "5"],
    "min_p": [*NOT_NUMBERS, -0.1, 1.1],
    "seed": [-(2**63) - 1, "a", 1.5, True, 2**63],
    "speculative": [-1, 1.5, "5"],
    "thinking_token_budget": [-2, 1.5, True, "5"],
    "stop": [[""], ["a", ""], ["x"] * 65, ["x" * 10**6], [1]],
    "stop_token_ids": [[-1], [V], [2**40], ["a"], [True], [1.0], [1] * 1025],
    "ignore_eos": [1, None, "yes"],
    "max_tokens": [0, -1, 1.0, "4", True],
    "stream_interval": [0, -1, 1.5, "a", True],
    "min_tokens": [-1, 5, 1.0, True, None],
    "logprobs": [-2, 21, -1, True, 1.5, "5"],
    "prompt_logprobs": [-2, 21, -1, True],
    "logprob_token_ids": [[-1], [V], ["a"], [True], [1] * 129],
    "repetition_detection": [5, {"size": 1}, {"max_pattern_size": 2}],
    "detokenize": ["no"],
    "skip_special_tokens": [0],
    "spaces_between_special_tokens": [0],
    "include_stop_str_in_output": ["x"],
    "truncate_prompt_tokens": [-2, 0, 10**9, "x", True, 1.5],
    "output_kind": ["delta", 1],
    "logit_bias": [
        {"-1": 1}, {"999999999": 1}, {"a": 1}, {"5": 101}, {"5": "x"}, {"1.5": 1}, {V: 1},
        {-1: 1}, {True: 1}, {3: math.nan}, {"²": 1}, dict.fromkeys(range(100_000), 1), [],
    ],
    "allowed_token_ids": [[], [V], [-1], ["a"], [True]],
    "bad_words": [[""], [3], ["x"] * 257],
    "structured_outputs": [
        "json", StructuredOutputs(), StructuredOutputs(regex="a", json="{}"),
        StructuredOutputs(json="{"), StructuredOutputs(json=5), StructuredOutputs(json="[1]"),
        StructuredOutputs(json={"a": object()}), StructuredOutputs(json={"a": math.nan}),
        StructuredOutputs(json="[" * 100_000),
        StructuredOutputs(json='{"a":"' + "x" * 10**6 + '"}'),
        StructuredOutputs(regex=""), StructuredOutputs(regex="a" * 10**6),
        StructuredOutputs(choice=[]), StructuredOutputs(choice="yes"),
        StructuredOutputs(choice=["a", ""]), StructuredOutputs(choice=[1]),
        StructuredOutputs(choice=["a"] * 100_000), StructuredOutputs(choice=["a" * 10**6]),
        StructuredOutputs(grammar=" "), StructuredOutputs(json_object=False),
        StructuredOutputs(json={}, whitespace_pattern=3),
    ],
    "extra_args": [3, [1]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda x: repr(x)[:30],
)  # fmt: skip
def test_a_wrong_value_names_its_field(name, value) -> None:
    with pytest.raises(RequestError) as caught:
        checked(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message
    assert len(caught.value.message) < 600


def test_every_field_has_wrong_values_here() -> None:
    from attrs import fields_dict

    assert set(WRONG) == set(fields_dict(SamplingParams))


RIGHT = [
    {"temperature": 0},
    {"temperature": 2},
    {"top_p": 1e-9},
    {"top_k": 0},
    {"top_k": 9_999_999},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"n": 16},
    {"n": 2, "best_of": 3},
    {"stop": []},
    {"stop": None},
    {"stop": ["x"] * 64},
    {"min_tokens": 4},
    {"logprobs": 0},
    {"logprobs": 20},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": CONTEXT},
    {"logit_bias": {}},
    {"allowed_token_ids": [0, V - 1]},
    {"structured_outputs": StructuredOutputs(choice=["a", "a"])},
    {"structured_outputs": StructuredOutputs(json={"type": "object"})},
    {"structured_outputs": StructuredOutputs(json_object=True)},
]


@pytest.mark.parametrize("fields", RIGHT, ids=repr)
def test_right_values_pass(fields) -> None:
    checked(**fields)


def test_values_come_back_in_their_normal_form() -> None:
    params = checked(top_k=-1, logit_bias={"5": 3, 7: -1.5}, max_tokens=10**12)
    assert params.top_k == 0
    assert params.logit_bias == {5: 3.0, 7: -1.5}
    assert params.max_tokens == CONTEXT - 10
    assert checked(max_tokens=None).max_tokens == CONTEXT - 10
    assert checked(max_tokens=None, prompt_len=None).max_tokens is None
    assert checked(top_k=10**7).top_k == V


def test_fields_that_contradict_each_other() -> None:
    for fields, blamed in [
        ({"min_tokens": 5}, "min_tokens"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"stop": "x", "detokenize": False}, "stop"),
    ]:
        with pytest.raises(RequestError) as caught:
            checked(**fields)
        assert caught.value.param == blamed


def test_the_whole_vocabulary_as_logprobs_needs_the_flag() -> None:
    params = SamplingParams(logprobs=-1)
    assert check(params, vocabulary=V, max_model_len=9, max_logprobs=-1).logprobs == -1


def test_a_prompt_that_leaves_no_room_says_both_numbers() -> None:
    for length, least in ((300, 0), (CONTEXT, 0), (CONTEXT - 3, 4)):
        with pytest.raises(ContextLengthExceeded, match=rf"{length}.*{CONTEXT}"):
            checked(prompt_len=length, min_tokens=least)
    assert checked(prompt_len=CONTEXT - 1).max_tokens == 1


@pytest.mark.parametrize(
    "ids", [[], [-1], [1, V], [2**40], [1.5], [True], ["a"], np.array([3, V]), np.array([-1])],
    ids=repr,
)  # fmt: skip
def test_wrong_prompts(ids) -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt(ids, vocabulary=V, max_model_len=CONTEXT)
    assert caught.value.param == "prompt"


def test_prompts_that_fit_and_truncation() -> None:
    check_prompt(np.arange(V)[: CONTEXT - 1], vocabulary=V, max_model_len=CONTEXT)
    check_prompt([0, V - 1], vocabulary=V, max_model_len=CONTEXT)
    with pytest.raises(ContextLengthExceeded):
        check_prompt([1] * CONTEXT, vocabulary=V, max_model_len=CONTEXT)
    assert truncated([1, 2, 3], None, 9) == [1, 2, 3]
    assert truncated([1, 2, 3], 2, 9) == [2, 3]
    assert len(truncated([1] * 20, -1, 9)) == 8


@pytest.mark.parametrize(
    ("params", "blamed"),
    [
        (PoolingParams(task="classify"), "task"),
        (PoolingParams(dimensions=0), "dimensions"),
        (PoolingParams(dimensions=65), "dimensions"),
        (PoolingParams(dimensions=True), "dimensions"),
        (PoolingParams(normalize="yes"), "normalize"),
        (PoolingParams(truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
    ],
)
def test_wrong_pooling(params, blamed) -> None:
    with pytest.raises(RequestError) as caught:
        check_pooling(params, tasks=["embed"], hidden=64, max_model_len=CONTEXT)
    assert caught.value.param == blamed
    check_pooling(PoolingParams(dimensions=64), tasks=["embed"], hidden=64, max_model_len=CONTEXT)


def test_bad_words_are_tokenised_as_they_stand_and_after_a_space(tmp_path) -> None:
    tokenizer = load_tokenizer(make_tiny(tmp_path / "tiny"))
    found = bad_word_ids(["hello", " hello"], tokenizer, 10**6)
    assert [tokenizer.decode(list(ids)) for ids in found] == ["hello", " hello"]
    with pytest.raises(RequestError) as caught:
        bad_word_ids(["hello"], tokenizer, 3)
    assert caught.value.param == "bad_words"
