"""Models that keep a state per row, in the whole engine: nothing that happens to a row shows."""

from __future__ import annotations

import pytest

from modulm import LLM, SamplingParams
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
        commit = llm._host.engine.scheduler.commit

        def watched(plan, result):
            events = commit(plan, result)
            preempted.append(events.stats.preempted)
            return events

        llm._host.engine.scheduler.commit = watched
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
        tokens = [list(one.outputs[0].token_ids) for one in found]
        cached = sum(one.num_cached_tokens or 0 for one in found)
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
