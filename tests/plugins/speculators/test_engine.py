"""Speculators chosen by flags, beside a real model: the same answers in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import parametrize_sample

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import ConfigError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm.plugins.defaults import choose_model
from modulm_frontend.validation import problem
from modulm_platform_cpu.platform import CpuPlatform
from modulm_speculation.automatic import AT_LOAD, LEAST, choose_speculator, stored_bytes
from modulm_speculation.step.part import DraftsPart

FIXED = {"adaptive": False, "num_speculative_tokens": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
#: The embedded model goes on with what repeats itself.
PROMPTS = ["la " * 40]


def answers(*params: SamplingParams, **flags: object) -> list[tuple]:
    """For each of `params` the tokens of all prompts, and how many steps they took."""
    results = []
    with LLM("demo", max_model_len=256, num_gpu_blocks_override=60, **flags) as llm:
        gauges = llm._core.loop.scheduler.gauges
        for each in params:
            steps = gauges().step
            outputs = llm.generate(PROMPTS, each, use_tqdm=False)
            tokens = [output.outputs[0].token_ids for output in outputs]
            results.append((tokens, gauges().step - steps))
    return results


@pytest.mark.exhaustive
def test_the_same_answers_in_fewer_steps() -> None:
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=2)
    plain = answers(GREEDY, sampled, GREEDY)
    for method in ("ngram", "suffix"):
        results = answers(GREEDY, sampled, GREEDY, speculative_config={"method": method, **FIXED})
        assert [tokens for tokens, _ in results] == [tokens for tokens, _ in plain]
        assert results[0][1] < 0.7 * plain[0][1]


def test_auto_drafts_what_repeats_and_says_so() -> None:
    plain = answers(GREEDY)
    with LLM("demo", max_model_len=256, num_gpu_blocks_override=60, speculative="auto") as llm:
        assert llm._core.info.parts["drafts"]["method"] == "suffix"
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        drafted = outputs[0].outputs[0].spec_decode_metrics
    assert [output.outputs[0].token_ids for output in outputs] == plain[0][0]
    assert sum(accepted for _, accepted in drafted.steps) > 0


TEXT = "Braird flies from Lima to Kyoto on January 2. Give me origin, destination and travel_day."
NAMES = ("origin", "destination", "travel_day")
RECORD = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 12} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
}


@parametrize_sample("backend", ["xgrammar", "llguidance"], every=2)
def test_text_that_a_grammar_determines_takes_few_steps(backend) -> None:
    constraint = StructuredOutputs(json=RECORD, disable_any_whitespace=True)
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs=constraint)
    results = []
    for flags in ({}, {"speculative": "auto"}):
        settings = {"backend": backend, "compile_workers": 1}
        with LLM("demo", max_model_len=256, structured_outputs_config=settings, **flags) as llm:
            gauges = llm._core.loop.scheduler.gauges
            for each in (params, params.with_(temperature=1.0, seed=4, logprobs=1)):
                steps = gauges().step
                (output,) = llm.chat([{"role": "user", "content": TEXT}], each, use_tqdm=False)
                results.append((output.outputs[0].token_ids, gauges().step - steps))
    assert [tokens for tokens, _ in results[:2]] == [tokens for tokens, _ in results[2:]]
    for (_, plain), (_, forced) in zip(results[:2], results[2:], strict=True):
        assert plain >= 1.8 * forced


@pytest.mark.parametrize(
    ("flags", "winner", "reason"),
    [
        ({}, None, "the default on cpu: off for weights of"),
        ({"speculative": "off"}, None, None),
        ({"speculative": "auto"}, "suffix", "--speculative auto"),
        ({"speculative": "auto", "spec_method": "ngram"}, "ngram", "set by --spec-method"),
        ({"speculative": "auto", "batch_invariant": True}, None, "one by one"),
        ({"speculative": "auto", "pipeline_parallel_size": 2}, None, "pipeline stages"),
        ({"speculative": "auto", "runner": "pooling"}, None, "generates no tokens"),
    ],
)
def test_the_decision(flags, winner, reason) -> None:
    config = EngineConfig().with_(model="demo", **flags)
    decision = DraftsPart.opened(config, manager.current()).decision()
    if reason is None:
        assert decision is None
        return
    assert (decision.subject, decision.winner) == ("speculative decoding", winner)
    assert reason in decision.reason


def test_auto_leaves_recurrent_states_alone() -> None:
    config, plugins = EngineConfig().with_(model="demo", speculative="auto"), manager.current()
    checkpoint = open_checkpoint(config, plugins)
    family = choose_model(plugins, checkpoint.architectures, checkpoint.config).driver
    decision, _ = choose_speculator(
        config,
        checkpoint,
        family,
        plugins,
        platform=CpuPlatform,
        weight_bytes=0,
        recurrent=True,
    )
    assert decision.winner is None
    reasons = {verdict.name: verdict.reason for verdict in decision.candidates}
    assert "copy of the recurrent states" in reasons["suffix"]
    assert "no MTP layer" in reasons["mtp"]


def test_explain_says_what_loading_may_turn_off(monkeypatch) -> None:
    monkeypatch.setattr("modulm_speculation.automatic.LEAST", 1)
    for flag, expected in ((None, AT_LOAD), ("auto", "--speculative auto")):
        config = EngineConfig().with_(model="demo", speculative=flag)
        decision = DraftsPart.opened(config, manager.current()).decision()
        assert decision.winner == "suffix"
        assert decision.reason.endswith(expected)


def test_a_family_whose_results_vary_drafts_nothing_by_default(monkeypatch) -> None:
    config, plugins = EngineConfig().with_(model="demo"), manager.current()
    checkpoint = open_checkpoint(config, plugins)
    family = choose_model(plugins, checkpoint.architectures, checkpoint.config).driver
    varying = type("Varying", (family,), {"batch_invariant": False})
    decision, _ = choose_speculator(
        config, checkpoint, varying, plugins, platform=CpuPlatform, weight_bytes=LEAST
    )
    assert decision.winner is None
    assert "off with Varying" in decision.reason


class Elsewhere(CpuPlatform):
    """A platform on which drafts have not been measured."""

    name = "elsewhere"
    drafts = False


@pytest.mark.parametrize(
    ("flags", "platform", "weights", "winner"),
    [
        ({}, CpuPlatform, LEAST, "suffix"),
        ({}, CpuPlatform, LEAST - 1, None),
        ({}, Elsewhere, LEAST, None),
        ({"async_scheduling": True}, CpuPlatform, LEAST, None),
        ({"speculative": "auto"}, Elsewhere, 1, "suffix"),
        ({"speculative": "off"}, CpuPlatform, LEAST, None),
    ],
)
def test_where_it_is_the_default(flags, platform, weights, winner) -> None:
    config, plugins = EngineConfig().with_(model="demo", **flags), manager.current()
    checkpoint = open_checkpoint(config, plugins)
    family = choose_model(plugins, checkpoint.architectures, checkpoint.config).driver
    decision, _ = choose_speculator(
        config, checkpoint, family, plugins, platform=platform, weight_bytes=weights
    )
    assert decision.winner == winner


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        ({}, "suffix"),
        ({"kernels": "none"}, None),
        ({"kernels": "none", "speculative": "auto"}, "suffix"),
    ],
)
def test_nothing_is_drafted_by_default_where_the_last_bits_may_change(
    monkeypatch, flags, method
) -> None:
    monkeypatch.setattr("modulm_speculation.automatic.LEAST", 1)
    with LLM("demo", max_model_len=64, num_gpu_blocks_override=8, **flags) as llm:
        assert llm._core.info.parts.get("drafts", {}).get("method") == method


@pytest.mark.parametrize("call", ["iterdir", "stat"])
def test_files_that_cannot_be_read_have_no_size(call, tmp_path, monkeypatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234567")
    assert stored_bytes(tmp_path) == 7

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, call, fail)
    assert stored_bytes(tmp_path) == 0


def test_how_much_is_drafted_changes_no_answer() -> None:
    plain, drafted = (
        answers(GREEDY),
        answers(GREEDY, spec_method="ngram", spec_tokens=3),
    )
    assert plain[0][0] == drafted[0][0]


def test_quantized_weights_in_fp32_give_the_bits_of_single_steps() -> None:
    found = []
    for more in ({}, {"speculative_config": {"method": "ngram", **FIXED}}):
        flags = {"max_model_len": 256, "num_gpu_blocks_override": 60, **more}
        with LLM("demo", dtype="float32", quantization="int8", **flags) as llm:
            params = GREEDY.with_(max_tokens=30, logprobs=1)
            (output,) = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1]


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
