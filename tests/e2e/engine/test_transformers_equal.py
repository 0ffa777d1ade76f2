"""The same 40 prompts through transformers' `generate` and through `LLM`: the same tokens."""

from __future__ import annotations

import random

import pytest
import torch
from samples import parametrize_sample
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from modulm import LLM, BeamSearchParams, SamplingParams
from modulm.testing.checkpoints import make_tiny

TOKENS = 20
_random = random.Random(40)
#: Five prompts of each length: transformers runs them together without padding.
LENGTHS = (1, 2, 7, 16, 17, 31, 48, 50)
PROMPTS = [[_random.randrange(3, 500) for _ in range(LENGTHS[i % 8])] for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("equal") / "tiny", "LlamaForCausalLM", seed=7)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        model=str(folder), dtype="float32", kv_cache_memory_bytes=1 << 24, cpu_threads=1
    ) as made:
        yield made


@pytest.fixture(scope="module")
def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Counted(LogitsProcessor):
    """Frequency and presence penalties, which transformers lacks, on what was generated."""

    def __init__(self, prompt_len: int, frequency: float, presence: float) -> None:
        self.prompt_len, self.frequency, self.presence = prompt_len, frequency, presence

    def __call__(self, input_ids, scores):
        for row, ids in enumerate(input_ids[:, self.prompt_len :]):
            counts = torch.bincount(ids, minlength=scores.shape[1])
            scores[row] -= self.frequency * counts + self.presence * (counts > 0)
        return scores


def continued(reference, penalties=(), **options) -> list[list[list[int]]]:
    """What `generate` says to each prompt: the returned sequences without it."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    answers: list = [None] * len(PROMPTS)
    for length in LENGTHS:
        places = [place for place, prompt in enumerate(PROMPTS) if len(prompt) == length]
        processors = [Counted(length, *penalties)] if penalties else []
        found = reference.generate(
            torch.tensor([PROMPTS[place] for place in places]),
            max_new_tokens=TOKENS,
            logits_processor=LogitsProcessorList(processors),
            **options,
        )
        for place, rows in zip(places, found[:, length:].chunk(len(places)), strict=True):
            answers[place] = rows.tolist()
    return answers


#: SamplingParams beside the options of `generate` that mean the same.
SAME = {
    "greedy": ({}, {}),
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "bias": (
        {"logit_bias": {5: 4.0, 77: -3.0, 300: 2.5}},
        {"sequence_bias": [[[5], 4.0], [[77], -3.0], [[300], 2.5]]},
    ),
    "top-k, cold": (
        {"temperature": 1e-4, "top_k": 5},
        {"do_sample": True, "temperature": 1e-4, "top_k": 5},
    ),
    "top-k 1, hot": (
        {"temperature": 3.0, "top_k": 1},
        {"do_sample": True, "temperature": 3.0, "top_k": 1},
    ),
    "top-p and min-p, cold": (
        {"temperature": 1e-4, "top_p": 0.5, "min_p": 0.1},
        {"do_sample": True, "temperature": 1e-4, "top_p": 0.5, "min_p": 0.1},
    ),
}


@parametrize_sample("name", SAME, every=3)
def test_tokens_are_those_of_generate(llm, reference, name) -> None:
    ours, theirs = SAME[name]
    params = SamplingParams(
        **({"temperature": 0.0} | ours), max_tokens=TOKENS, ignore_eos=True, seed=1
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    torch.manual_seed(0)
    expected = continued(reference, **theirs)
    assert [[output.outputs[0].token_ids] for output in outputs] == expected


def test_counting_penalties(llm, reference) -> None:
    params = SamplingParams(
        temperature=0, frequency_penalty=0.8, presence_penalty=-0.5, max_tokens=TOKENS,
        ignore_eos=True,
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    expected = continued(reference, (0.8, -0.5))
    assert [[output.outputs[0].token_ids] for output in outputs] == expected


@pytest.mark.exhaustive
def test_beams(llm, reference) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = llm.beam_search(prompts, BeamSearchParams(3, TOKENS, ignore_eos=True))
    expected = continued(reference, num_beams=3, num_return_sequences=3)
    for prompt, output, beams in zip(PROMPTS, found, expected, strict=True):
        assert [beam.tokens[len(prompt) :] for beam in output.sequences] == beams


def test_seeded_draws_are_the_same_alone_and_in_a_crowd(llm) -> None:
    params = [
        SamplingParams(temperature=1.5, top_p=0.9, seed=i, max_tokens=TOKENS, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    crowd = llm.generate(prompts, params, use_tqdm=False)
    for place in (0, 7, 39):
        (alone,) = llm.generate(prompts[place], params[place], use_tqdm=False)
        assert alone.outputs[0].token_ids == crowd[place].outputs[0].token_ids
    other = llm.generate(prompts[0], params[0].with_(seed=99), use_tqdm=False)[0]
    assert other.outputs[0].token_ids != crowd[0].outputs[0].token_ids
