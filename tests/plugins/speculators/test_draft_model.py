"""A smaller model as drafter: nothing changes, and it keeps up with whatever happens to rows."""

from __future__ import annotations

import pytest
from samples import parametrize_sample

from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny

SHARED = [7, 9, 11, 13] * 9
PROMPTS = [
    [5, 99, 7, 300], [17], [8] * 21, [*SHARED, 40], [*SHARED, 41], list(range(100, 130)), [3, 4, 5],
]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PLAIN = {"kernels": "none", "attention_backend": "sdpa", "batch_invariant": True}
SIZES = {"max_model_len": 128, "max_num_batched_tokens": 48, "block_size": 16}
#: Under the second one rows are preempted.
FLAGS = {
    "roomy": {"num_gpu_blocks_override": 80},
    "few blocks": {"num_gpu_blocks_override": 9},
    "torch": {"num_gpu_blocks_override": 40, **PLAIN},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("draft") / "tiny"))


def test_steps_that_verify_are_recorded(folder) -> None:
    pytest.importorskip("modulm_kernels_cpu", reason="no compiled CPU kernels")
    for flags in ({}, spec(folder)):
        with LLM(folder, num_gpu_blocks_override=40, **SIZES, **flags) as llm:
            requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
            llm.generate(requests, GREEDY, use_tqdm=False)
            forward = llm._core.executor._worker.runner._forward
            assert forward.reason is None
            steps = [program.inputs.step for program in forward._programs.values()]
            sizes = {(len(s.query_starts) - 1, len(s.tokens)) for s in steps}
            assert ((2, 10) in sizes) is bool(flags)


def run(folder, params=GREEDY, prompts=PROMPTS, times=2, **flags):
    """Tokens of all prompts, each time they are asked; tokens drafted, accepted, preemptions."""
    counts = [0, 0, 0]
    with LLM(folder, **{**SIZES, **flags}) as llm:
        scheduler = llm._core.loop.scheduler
        plain = scheduler._stats

        def stats(*arguments):
            stats_of_step = plain(*arguments)
            for index, name in enumerate(("drafted", "accepted", "preempted")):
                counts[index] += getattr(stats_of_step, name)
            return stats_of_step

        scheduler._stats = stats
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = [
            [o.outputs[0].token_ids for o in llm.generate(requests, params, use_tqdm=False)]
            for _ in range(times)
        ]
    return answers, counts


def spec(model, **more):
    table = {"method": "draft_model", "model": str(model), "adaptive": False}
    return {"speculative_config": {**table, "num_speculative_tokens": 4, **more}}


@parametrize_sample("flags", FLAGS, every=3)
def test_the_target_as_its_own_draft_is_always_right(folder, flags) -> None:
    expected, plain = run(folder, **FLAGS[flags])
    answers, (drafted, accepted, preempted) = run(folder, **FLAGS[flags], **spec(folder))
    assert answers == expected
    # Prefix hits, chunks of prompts, blocks given back and taken again: its cache is always right.
    assert drafted == accepted > 150
    assert (plain[2] > 0) == (preempted > 0) == (flags == "few blocks")


@pytest.mark.exhaustive
@parametrize_sample(
    ("architecture", "more"),
    [
        ("Qwen3ForCausalLM", {"head_dim": 16, "num_key_value_heads": 4}),
        ("MistralForCausalLM", {"sliding_window": 20}),
        ("Gemma3ForCausalLM", {}),
    ],
    every=3,
)
def test_another_family_with_other_heads_and_windows(folder, tmp_path, architecture, more) -> None:
    draft = make_tiny(tmp_path / "draft", architecture, seed=1, **more)
    expected, _ = run(folder, **FLAGS["few blocks"])
    answers, (drafted, _, _) = run(folder, **FLAGS["few blocks"], **spec(draft))
    assert answers == expected
    assert drafted > 150


def test_a_draft_with_windows_keeps_up(tmp_path) -> None:
    target = make_tiny(tmp_path / "tiny", "MistralForCausalLM", sliding_window=20)
    expected, _ = run(target, **FLAGS["roomy"])
    answers, (drafted, accepted, _) = run(target, **FLAGS["roomy"], **spec(target))
    assert answers == expected
    assert drafted == accepted > 150


def test_a_target_with_states_and_a_draft_without(folder, tmp_path) -> None:
    target = make_tiny(tmp_path / "states", "Mamba2ForCausalLM")
    flags = {"num_gpu_blocks_override": 40, "max_num_seqs": 8}
    expected, _ = run(target, prompts=PROMPTS[:3], times=1, **flags)
    answers, (drafted, _, _) = run(target, prompts=PROMPTS[:3], times=1, **flags, **spec(folder))
    assert answers == expected
    assert drafted > 50


def test_a_request_may_be_without_and_how_much_is_drafted_adapts(folder) -> None:
    params = [GREEDY, GREEDY.with_(speculative=False)] * 3 + [GREEDY.with_(speculative=1)]
    expected, _ = run(folder, **FLAGS["roomy"])
    for adaptive in (False, True):
        answers, (drafted, accepted, _) = run(
            folder, params, **FLAGS["roomy"], **spec(folder, adaptive=adaptive)
        )
        assert answers == expected
        assert drafted == accepted
        assert adaptive or drafted > 20


@pytest.mark.exhaustive
def test_a_quantized_draft_and_cache(folder) -> None:
    pytest.importorskip("modulm_kernels_cpu", reason="int8 needs the compiled CPU kernels")
    expected, _ = run(folder, **FLAGS["roomy"])
    more = {"quantization": "int8", "kv_cache_dtype": "int8"}
    answers, (drafted, accepted, _) = run(folder, **FLAGS["roomy"], **spec(folder, **more))
    assert answers == expected
    assert drafted > accepted > 0.5 * drafted


@pytest.mark.exhaustive
def test_a_long_text_goes_on_beyond_what_the_draft_can(folder, tmp_path) -> None:
    draft = make_tiny(tmp_path / "short", max_position_embeddings=40, seed=0)
    longer = GREEDY.with_(max_tokens=60)
    expected, _ = run(folder, longer, times=1, **FLAGS["roomy"])
    answers, (drafted, _, _) = run(folder, longer, times=1, **FLAGS["roomy"], **spec(draft))
    assert answers == expected
    assert drafted > 50


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "model: draft_model needs the path or hub id of a model"),
        ({"model": "/nowhere"}, "model /nowhere"),
        (
            {"model": "demo", "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size: leave it out",
        ),
        ({"model": "demo"}, "its tokens differ from the target model's: "),
    ],
)
def test_a_draft_that_cannot_be(folder, table, message) -> None:
    with pytest.raises(ConfigError, match=message):
        run(folder, speculative_config={"method": "draft_model", **table})


def test_a_draft_with_other_tokens_or_states(folder, tmp_path) -> None:
    small = make_tiny(tmp_path / "small", vocab=300)
    with pytest.raises(ConfigError, match="300 tokens, the target has 512"):
        run(folder, **spec(small))
    states = make_tiny(tmp_path / "states", "Mamba2ForCausalLM")
    with pytest.raises(
        ConfigError, match="has recurrent states, which draft models do not support"
    ):
        run(folder, **spec(states))
