"""Structured output through the whole engine: valid beside plain requests, errors to themselves."""

from __future__ import annotations

import json

import pytest
from samples import parametrize_sample

from modulm import LLM, SamplingParams, StructuredOutputs
from modulm.errors import RequestError
from modulm.testing.checkpoints import make_tiny

DIGIT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("structured") / "tiny")


def open_llm(folder, **flags) -> LLM:
    held = {"compile_workers": 1, **flags.pop("structured_outputs_config", {})}
    return LLM(
        model=str(folder), dtype="float32", kv_cache_memory_bytes=1 << 24, cpu_threads=1,
        structured_outputs_config=held, **flags,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(folder):
    with open_llm(folder, max_num_seqs=6) as made:
        yield made


def asks(seed=1, **constraint) -> SamplingParams:
    more = {k: constraint.pop(k) for k in ("n", "ignore_eos", "min_tokens") if k in constraint}
    held = StructuredOutputs(disable_any_whitespace=True, **constraint)
    return SamplingParams(
        temperature=1.5, seed=seed, max_tokens=60, structured_outputs=held, **more
    )


def test_answers_are_valid_and_plain_rows_are_as_without_them(llm) -> None:
    plain = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True)
    prompts = [f"prompt {i}" for i in range(12)]
    alone = llm.generate(prompts[::2], plain, use_tqdm=False)
    constraints = [{"json": DIGIT}, {"choice": ["yes", "no"]}, {"regex": r"\d{4}"}] * 2
    params = [p for i, c in enumerate(constraints) for p in (plain, asks(i, **c))]
    mixed = llm.generate(prompts, params, use_tqdm=False)
    for one, other in zip(alone, mixed[::2], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    texts = [output.outputs[0].text for output in mixed[1::2]]
    assert all(output.outputs[0].finish_reason == "stop" for output in mixed[1::2])
    for schema, choice, digits in zip(*[iter(texts)] * 3, strict=True):
        assert set(json.loads(schema)) == {"a"}
        assert choice in ("yes", "no")
        assert len(digits) == 4
        assert digits.isdigit()


def test_a_bad_constraint_is_raised_and_the_next_call_works(llm) -> None:
    good = asks(choice=["only this"])
    with pytest.raises(RequestError, match="regex"):
        llm.generate(["a", "b"], [asks(regex="["), good], use_tqdm=False)
    (output,) = llm.generate("b", good, use_tqdm=False)
    assert output.outputs[0].text == "only this"


def test_choices_of_one_request_have_matchers_of_their_own(llm) -> None:
    words = ["yes", "no", "maybe", "never", "always"]
    (output,) = llm.generate("x", asks(n=6, choice=words), use_tqdm=False)
    texts = [choice.text for choice in output.outputs]
    assert set(texts) <= set(words)
    assert len(set(texts)) > 1


def test_a_complete_grammar_ends_whatever_else_was_asked(llm) -> None:
    held = asks(choice=["yes"], ignore_eos=True, min_tokens=30)
    (output,) = llm.generate("x", held, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("yes", "stop")


@parametrize_sample("held_too", [False, True], every=2)
def test_the_grammar_starts_after_the_reasoning(folder, held_too) -> None:
    flags = {"reasoning_parser": "qwen3"}
    if held_too:
        flags["structured_outputs_config"] = {"enable_in_reasoning": True}
    prompt = "<|im_start|>assistant\n<think>\n"
    with open_llm(folder, **flags) as llm:
        (output,) = llm.generate(prompt, asks(choice=["yes"]), use_tqdm=False)
        closed = prompt + "Hm.\n</think>\n\n"
        (after,) = llm.generate(closed, asks(choice=["yes"]), use_tqdm=False)
    assert (output.outputs[0].text == "yes") is held_too
    assert after.outputs[0].text == "yes"
