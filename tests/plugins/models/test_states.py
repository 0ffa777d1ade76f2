"""Models that keep a state per row, in the whole engine: nothing that happens to a row shows."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import sample

from modulm import LLM, SamplingParams
from modulm.errors import ConfigError, UnsupportedError
from modulm.testing.checkpoints import make_tiny

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "sdpa",
    "max_model_len": 64,
    "block_size": 16,
    "enable_prefix_caching": True,
}
PROMPTS = [[7, 8, 9] * 6, [5], [7, 8, 9] * 6, [11, 12] * 10, [13] * 7]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def answers(folder, **flags):
    """The answers' tokens, how often rows were preempted, cached prompt tokens, and the notes."""
    with LLM(str(folder), **{**SETTINGS, **flags}) as llm:
        preempted = []
        commit = llm._core.loop.scheduler.commit

        def watched(plan, result):
            events = commit(plan, result)
            preempted.append(events.stats.preempted)
            return events

        llm._core.loop.scheduler.commit = watched
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        cached = sum(one.num_cached_tokens or 0 for one in outputs)
        return tokens, sum(preempted), cached, llm.info.notes


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """State-space layers beside attention."""
    return make_tiny(tmp_path_factory.mktemp("hybrid"), "GraniteMoeHybridForCausalLM")


@pytest.fixture(scope="module")
def roomy(hybrid):
    return answers(hybrid, max_num_seqs=8)


def test_prefixes_are_not_reused_and_the_engine_says_so(roomy):
    tokens, preempted, cached, notes = roomy
    assert tokens[0] == tokens[2]
    assert (preempted, cached) == (0, 0)
    assert any("state per sequence" in note for note in notes)


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_seqs": 8, "num_gpu_blocks_override": 7},
        {"max_num_seqs": 2, "max_num_batched_tokens": 5},
    ],
    ids=["preempted", "prompts in chunks"],
)
def test_the_answers_are_those_of_an_engine_with_room(hybrid, roomy, flags):
    tokens, preempted, cached, _ = answers(hybrid, **flags)
    assert tokens == roomy[0]
    assert (preempted > 0) == ("num_gpu_blocks_override" in flags)
    assert cached == 0


ARCHITECTURES = ("GraniteMoeHybridForCausalLM", "Mamba2ForCausalLM", "Qwen3NextForCausalLM")
#: Recurrences are equal to the bit (tests/unit/ops, tests/plugins/kernels); products of few rows
#: and of many may round differently.
TOLERANCE = 1e-4
LONG = {
    **SETTINGS,
    "max_model_len": 256,
    "max_num_seqs": 8,  # twice the prompts: room for the states on the way of all of them
    "mamba_cache_mode": "all",
    "mamba_block_size": 64,
}


def logprobs(llm, prompts):
    """What the whole vocabulary's log probabilities are at each generated token, and the hits."""
    wanted = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=-1)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False
    )
    values = [
        [
            {token: entry.logprob for token, entry in position.items()}
            for position in one.outputs[0].logprobs
        ]
        for one in outputs
    ]
    return values, [one.num_cached_tokens or 0 for one in outputs]


@pytest.fixture(scope="module", params=sample(ARCHITECTURES, every=3))
def reusing(request, tmp_path_factory):
    """An engine that keeps states, and one that does not."""
    folder = make_tiny(tmp_path_factory.mktemp("reusing"), request.param)
    flags = {**LONG, "max_num_batched_tokens": 256}
    with (
        LLM(str(folder), **flags, max_logprobs=-1) as one,
        LLM(str(folder), **{**flags, "enable_prefix_caching": False}, max_logprobs=-1) as other,
    ):
        yield one, other


@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=4),
    seed=st.integers(0, 3),
)
@example(lengths=[(9, 39), (132, 18), (43, 29), (160, 30)], seed=0)
def test_a_hit_gives_what_a_miss_gives(reusing, lengths, seed):
    """Prompts share `begin` tokens of one text; each is computed beside others, and after them."""
    one, other = reusing
    one.reset_prefix_cache()
    rng = random.Random(seed)
    text = [rng.randrange(1, 500) for _ in range(400)]
    prompts = [
        [*text[:begin], *(rng.randrange(1, 500) for _ in range(suffix))]
        for begin, suffix in lengths
    ]
    expected, cached = logprobs(other, prompts)
    assert not any(cached)
    for _ in range(2):
        actual, cached = logprobs(one, prompts)
        for one_found, one_expected in zip(actual, expected, strict=True):
            assert one_found == [
                pytest.approx(position, abs=TOLERANCE) for position in one_expected
            ]
    for prompt, hit in zip(prompts, cached, strict=True):
        assert hit == (len(prompt) - 1) // 64 * 64


def test_states_of_another_mode_are_refused(hybrid):
    with pytest.raises(UnsupportedError, match="align is not supported yet"):
        LLM(str(hybrid), **{**LONG, "mamba_cache_mode": "align"})
    with pytest.raises(ConfigError, match="multiple of 64"):
        LLM(str(hybrid), **{**LONG, "mamba_block_size": 100})
