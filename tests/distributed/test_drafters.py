"""Drafters with caches of models on several ranks: they draft what they draft on one.

The model as its own draft is always right, if histories, lengths and caches of all ranks agree.
"""

from __future__ import annotations

import pytest
from samples import parametrize_sample
from tests.plugins.speculators.test_draft_model import FLAGS, PROMPTS, run, spec
from tests.plugins.speculators.test_mtp import LAYOUTS, Reference

from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny

RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "pool", "dtype": "float32"}
#: A dense model; blocks that are given back; four ranks, which hold heads of keys twice; experts,
#: also on four; latents, which all ranks hold.
CASES = {
    "two": ("Qwen3ForCausalLM", FLAGS["roomy"]),
    "few blocks": ("Qwen3ForCausalLM", FLAGS["few blocks"]),
    "four": ("Qwen3ForCausalLM", {**FLAGS["roomy"], "tensor_parallel_size": 4}),
    "experts": ("MixtralForCausalLM", {**FLAGS["roomy"], "enable_expert_parallel": True}),
    "four, experts": (
        "MixtralForCausalLM",
        {**FLAGS["roomy"], "enable_expert_parallel": True, "tensor_parallel_size": 4},
    ),
    "four, latent": ("DeepseekV3ForCausalLM", {**FLAGS["roomy"], "tensor_parallel_size": 4}),
}


@parametrize_sample("name", CASES, every=4)
def test_the_target_as_its_own_draft_is_always_right(plugins, tmp_path, name) -> None:
    architecture, flags = CASES[name]
    folder = str(make_tiny(tmp_path / "tiny", architecture))
    one = {**flags, "tensor_parallel_size": 1, "enable_expert_parallel": False}
    expected, _ = run(folder, dtype="float32", times=1, **one)
    answers, (drafted, accepted, preempted) = run(
        folder, times=1, **{**RANKS, **flags}, **spec(folder)
    )
    assert answers == expected
    assert drafted == accepted > 60
    assert (preempted > 0) == (name == "few blocks")


#: Ranks of an MTP layer: two; four, some of which hold the same heads; with experts spread.
SPLITS = {
    "two": {}, "four": {"tensor_parallel_size": 4},
    "two, experts": {"enable_expert_parallel": True},
    "four, experts": {"tensor_parallel_size": 4, "enable_expert_parallel": True},
}  # fmt: skip


#: Tiny models whose experts four ranks cannot share evenly.
EXPERTS = {"Qwen3NextForCausalLM": {"num_experts": 8}}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_mtp_layers(plugins, tmp_path, name, split, adaptive) -> None:
    folder = str(
        make_tiny(tmp_path / "tiny", name, **LAYOUTS[name].config, **EXPERTS.get(name, {}))
    )
    Reference(folder, LAYOUTS[name]).store(folder)
    table = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": adaptive}
    flags = {"num_gpu_blocks_override": 64, "max_num_seqs": 8, "speculative_config": table}
    expected, counts = run(folder, times=1, dtype="float32", **flags)
    answers, others = run(folder, times=1, **{**RANKS, **SPLITS[split]}, **flags)
    assert answers == expected
    assert counts[0] > 20
    if not adaptive:
        assert others == counts


@pytest.mark.exhaustive
def test_an_eagle_head_and_a_lookup(plugins) -> None:
    for table in ({"method": "eagle", "model": "demo-eagle"}, {"method": "ngram"}):
        table = {**table, "num_speculative_tokens": 3, "adaptive": False}
        flags = {"num_gpu_blocks_override": 64, "speculative_config": table}
        expected, counts = run("demo", prompts=PROMPTS[:3], times=1, dtype="float32", **flags)
        answers, others = run("demo", prompts=PROMPTS[:3], times=1, **RANKS, **flags)
        assert (answers, others) == (expected, counts)


@pytest.mark.exhaustive
def test_what_is_not_supported(plugins, tmp_path) -> None:
    folder = str(make_tiny(tmp_path / "tiny", num_key_value_heads=1))
    for flags, message in (
        ({"pipeline_parallel_size": 2}, "drafters with pipeline stages"),
        ({**RANKS, "decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(folder, **FLAGS["roomy"], **flags, **spec(folder))
    with pytest.raises(ConfigError, match="leave it out: drafters are on all 2 ranks"):
        run(folder, **FLAGS["roomy"], **RANKS, **spec(folder, draft_tensor_parallel_size=1))
