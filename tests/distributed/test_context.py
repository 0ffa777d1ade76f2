"""The cached tokens of a sequence over the ranks that would keep the same."""

from __future__ import annotations

import numpy as np
import pytest

from modulm import LLM, SamplingParams
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.errors import ModulmError
from modulm.testing.checkpoints import make_tiny
from modulm_distributed.context import Runs
from modulm_frontend.beam_search import BeamSearchParams

FLAGS = {
    "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 24,
    "block_size": 16, "use_tqdm_on_load": False,
}  # fmt: skip
RANKS = {"distributed_executor_backend": "pool", "tensor_parallel_size": 2}
CUT = RANKS | {"decode_context_parallel_size": 2}
PROMPTS = [{"prompt_token_ids": [50 + i, *[5, 9, 40, 7, 33] * 5]} for i in range(4)]
LONGER = [{"prompt_token_ids": PROMPTS[3]["prompt_token_ids"] * 2}]
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("context") / "model"
    return str(make_tiny(made, num_key_value_heads=1, num_hidden_layers=1))


@pytest.mark.parametrize(("ranks", "length", "block"), [(2, 1, 4), (3, 2, 4), (4, 8, 8)])
def test_every_token_is_kept_by_one_rank_in_a_place_of_its_own(ranks, length, block):
    tokens = np.arange(5 * block * ranks)
    slots = 2 * block * ranks + tokens  # blocks 2 to 6 of all ranks
    keepers = np.zeros_like(tokens)
    for rank in range(ranks):
        runs = Runs(rank, ranks, length)
        own = runs.slots(slots, block)
        kept = own > 0
        keepers += kept
        # One after the other, in the blocks of the same numbers.
        assert own[kept].tolist() == list(range(2 * block, 7 * block))
        assert (tokens[kept] // length % ranks == rank).all()
        assert runs.before(tokens + 1).tolist() == np.cumsum(kept).tolist()
    assert (keepers == 1).all()


def test_a_pool_that_runs_short_is_exact(plugins, folder, monkeypatch):
    """Prefixes are found again, rows that give up their blocks go on, beams part and copy them."""
    found, gave_up, preempt = [], [], BudgetScheduler._preempt
    monkeypatch.setattr(BudgetScheduler, "_preempt", lambda it: [gave_up.append(it), preempt(it)])
    for more in ({"num_gpu_blocks_override": 64}, CUT | {"num_gpu_blocks_override": 5}):
        with LLM(folder, **FLAGS, **more) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            first, again = (llm.generate(LONGER, SHORT, use_tqdm=False)[0] for _ in range(2))
            (beams,) = llm.beam_search(PROMPTS[:1], BEAMS)
        texts = [list(output.outputs[0].token_ids) for output in (*outputs, first, again)]
        found.append((texts, [list(sequence.tokens) for sequence in beams.sequences]))
    assert found[1] == found[0]
    assert gave_up
    assert again.num_cached_tokens == 32  # a block of both ranks


def test_the_same_memory_holds_more_tokens(plugins, folder):
    room = []
    for flags in (RANKS, CUT):
        more = flags | {"kv_cache_memory_bytes": 24 << 10, "attention_backend": "sdpa"}
        with LLM(folder, **FLAGS, **more) as llm:
            room.append(llm._core.info.cache_tokens)
    assert room[1] == 2 * room[0] > 0


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({}, {"tensor_parallel_size": 1}, "must divide --tensor-parallel-size 1"),
        ({"num_key_value_heads": 2}, {}, "no two ranks hold the same keys"),
        ({}, {"cp_kv_cache_interleave_size": 3}, "cp_kv_cache_interleave_size: does not divide"),
    ],
)
def test_what_cannot_be_shared_out_says_why(plugins, tmp_path, folder, changes, flags, words):
    model = make_tiny(tmp_path / "model", **changes) if changes else folder
    with pytest.raises(ModulmError, match=words):
        LLM(str(model), **FLAGS, **(CUT | flags))


def test_a_model_without_such_layers(plugins, tmp_path):
    model = make_tiny(tmp_path / "model", "Mamba2ForCausalLM")
    with pytest.raises(ModulmError, match="not supported, because no layer"):
        LLM(str(model), **FLAGS, **CUT)
