"""Prompts of embeddings through the whole engine: what their tokens would have given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import parametrize_sample
from transformers import AutoModelForCausalLM

from modulm import LLM, BeamSearchParams, SamplingParams
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WORDS = [[(7 * place + 3 * prompt + 5) % 500 for place in range(70)] for prompt in range(4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("embeds") / "tiny")


def table_of(checkpoint: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return lambda ids: model.get_input_embeddings()(torch.tensor(ids))


def opened(checkpoint: Path, **flags: Any) -> LLM:
    given = {
        "dtype": "float32", "enable_prompt_embeds": True, "cpu_threads": 1, "block_size": 32,
        "max_model_len": 128, "num_gpu_blocks_override": 33, **flags,
    }  # fmt: skip
    return LLM(model=str(checkpoint), **given)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with opened(checkpoint, max_num_batched_tokens=32) as made:
        yield made
        check_empty(made._core.loop)


def answers(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def ids_of(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids} for ids in prompts]


def test_embeddings_are_prompts(llm: LLM, checkpoint: Path) -> None:
    """In chunks of 32 tokens, beside prompts of tokens; the second time their blocks are found."""
    embed = table_of(checkpoint)
    expected = answers(llm, ids_of(WORDS))
    llm.reset_prefix_cache()
    given = [{"prompt_embeds": embed(ids)} for ids in WORDS]
    crowd = [*given, *ids_of(WORDS)]
    assert answers(llm, crowd) == expected * 2
    again = llm.generate(given, GREEDY, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in again] == expected
    assert [out.num_cached_tokens for out in again] == [64] * 4
    # A beginning in common is found, embeddings that differ are not.
    other = embed(WORDS[0]).clone()
    other[40:] += 0.5
    (changed,) = llm.generate({"prompt_embeds": other}, GREEDY, use_tqdm=False)
    assert changed.num_cached_tokens == 32
    llm.reset_prefix_cache()
    assert answers(llm, {"prompt_embeds": other}) == [changed.outputs[0].token_ids]


def test_tokens_of_the_placeholder_are_something_else(llm: LLM, checkpoint: Path) -> None:
    zeros = [0] * 70
    expected = answers(llm, ids_of([zeros]))
    llm.reset_prefix_cache()
    first = llm.generate({"prompt_embeds": table_of(checkpoint)(WORDS[1])}, GREEDY, use_tqdm=False)
    assert first[0].prompt_token_ids == zeros
    assert answers(llm, ids_of([zeros])) == expected != [first[0].outputs[0].token_ids]


def test_parts_of_a_prompt(llm: LLM, checkpoint: Path) -> None:
    ids = WORDS[2]
    mask = [not 10 <= place < 30 for place in range(70)]
    mixed = {
        "prompt_token_ids": ids,
        "prompt_is_token_ids": mask,
        "prompt_embeds": table_of(checkpoint)(ids),
    }
    assert answers(llm, mixed) == answers(llm, ids_of([ids]))


def test_penalties_know_no_placeholders(llm: LLM, checkpoint: Path) -> None:
    """The token whose id stands in the prompt is not punished for it."""
    ids = [5, *WORDS[0][:20]]
    params = GREEDY.with_(repetition_penalty=50.0, allowed_token_ids=(0, 9, 11), max_tokens=1)
    embeds = table_of(checkpoint)(ids)
    assert 0 not in ids
    assert not {9, 11} & set(ids)
    assert answers(llm, {"prompt_embeds": embeds}, params) == answers(llm, ids_of([ids]), params)


def test_choices_and_beams(llm: LLM, checkpoint: Path) -> None:
    ids = WORDS[3]
    prompt = {"prompt_embeds": table_of(checkpoint)(ids)}
    drawn = SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True)
    for params in (drawn, drawn.with_(best_of=4)):
        both = llm.generate([prompt, *ids_of([ids])], params, use_tqdm=False)
        first, second = ([choice.token_ids for choice in out.outputs] for out in both)
        assert first == second
    beams = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    both = llm.beam_search([prompt, *ids_of([ids])], beams)
    first, second = ([beam.tokens[70:] for beam in out.sequences] for out in both)
    assert first == second


def test_preempted_and_computed_again(checkpoint: Path) -> None:
    embed = table_of(checkpoint)
    long = GREEDY.with_(max_tokens=40)
    with opened(checkpoint, num_gpu_blocks_override=13, enable_prefix_caching=False) as tight:
        expected = [answers(tight, {"prompt_embeds": embed(ids)}, long)[0] for ids in WORDS]
        seen: list[int] = []
        tight.count_by(_Preemptions(seen))
        assert answers(tight, [{"prompt_embeds": embed(ids)} for ids in WORDS], long) == expected
        assert sum(seen) > 0


class _Preemptions:
    """Counts what was preempted; nothing else."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def step(self, stats: Any) -> None:
        self._seen.append(stats.preempted)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **keywords: None


@parametrize_sample(
    ("architecture", "flags"),
    [
        ("GraniteForCausalLM", {}),
        ("Gemma2ForCausalLM", {}),
        ("BloomForCausalLM", {}),
        ("OPTForCausalLM", {}),
        ("XGLMForCausalLM", {}),
        ("LlamaForCausalLM", {"model_impl": "transformers"}),
    ],
    every=2,
)
def test_families_that_do_something_to_embeddings(
    tmp_path: Path, architecture: str, flags: dict[str, Any]
) -> None:
    """What transformers' `get_input_embeddings` gives is what is taken."""
    folder = make_tiny(tmp_path / "tiny", architecture)
    with opened(folder, enable_prefix_caching=False, **flags) as llm:
        ids = WORDS[0][:20]
        given = {"prompt_embeds": table_of(folder)(ids)}
        assert answers(llm, given) == answers(llm, ids_of([ids]))


def test_a_model_that_needs_more_of_tokens_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", "Gemma3nForCausalLM")
    with pytest.raises(ConfigError, match="Gemma3nForCausalLM needs token ids"):
        opened(folder)
