"""Packages of this repository that declare drivers, or choose among them, by hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

from modulm import LLM, EngineConfig, SamplingParams
from modulm.contracts.attention import AttentionSpec
from modulm.contracts.platform import Probe
from modulm.contracts.quantization import LinearSpec
from modulm.ops import bind
from modulm.plugins import Choice, PluginManager, defaults, hookimpl
from modulm.plugins.manager import using
from modulm.plugins.selection import Selection
from modulm.testing.checkpoints import make_tiny
from modulm_demo import Demo
from modulm_parsing.choice import parser_decisions
from modulm_platform_cpu.hooks import modulm_choose_platform
from modulm_platform_cpu.platform import CpuPlatform

SPEC = AttentionSpec(4, 2, 16, 0.25, "float32", "float32")


def choose_attention(selection: str = "", plugins: PluginManager | None = None, kernels=None):
    plugins = plugins or PluginManager(Selection.parse(selection))
    platform = plugins.load("platforms", "cpu")()
    providers = defaults.choose_kernels(plugins, platform, kernels).driver
    return defaults.choose_attention(
        plugins, SPEC, platform, bind([provider() for provider in providers])
    ).decision


def test_attention_of_a_package_that_the_platform_does_not_name() -> None:
    pytest.importorskip("modulm_kernels_cpu", reason="no compiled CPU kernels")
    decision = choose_attention()
    assert "cpu_paged" not in PluginManager().load("platforms", "cpu").attention
    assert decision.winner == "cpu_paged"
    assert "compiled kernels" in decision.reason


@pytest.mark.parametrize(
    "selection", ["-cpu_paged", "-attention/cpu_paged", "-modulm-attention-cpu-paged"]
)
def test_attention_that_was_switched_off_is_not_chosen(selection: str) -> None:
    assert choose_attention(selection).winner == "sdpa"


def test_attention_stands_aside_without_its_kernels() -> None:
    decision = choose_attention(kernels=())
    assert decision.winner == "sdpa"
    assert "order of platform cpu" in decision.reason


def test_anybody_elses_choice_comes_first() -> None:
    class Mine:
        @hookimpl
        def modulm_choose_attention(self, spec: object) -> Choice:
            return Choice("sdpa", "I said so")

    plugins = PluginManager()
    plugins.add(Mine())
    assert choose_attention(plugins=plugins).reason == "I said so; chosen by Mine"


def test_processors_where_nothing_faster_is() -> None:
    none, some, cpu = Probe(0, "no GPU"), Probe(100, "a GPU"), Probe(1, "always")
    assert modulm_choose_platform({"cpu": cpu, "cuda": some}) is None
    assert modulm_choose_platform({"cuda": none}) is None
    choice = modulm_choose_platform({"cpu": cpu, "cuda": none})
    assert choice == Choice("cpu", "no faster platform: cuda: no GPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the GPU is taken")
def test_the_device_says_why_it_is_no_other() -> None:
    decision = defaults.choose_platform(PluginManager()).decision
    assert decision.winner == "cpu"
    assert "cuda: torch" in decision.reason


def test_parsers_of_the_demo_by_name_and_by_folder(tmp_path: Path) -> None:
    for model in ("demo", str(Demo.source())):
        decisions = parser_decisions(EngineConfig.from_keywords(model=model), PluginManager())
        assert [decision.winner for decision in decisions] == ["hermes", "qwen3"]
        assert "modulm-demo" in decisions[0].reason
    folder, plain = (
        str(make_tiny(tmp_path, "Qwen3ForCausalLM")),
        {"chat_template": "{{ messages }}"},
    )
    for flags, wanted in (({}, ["hermes", "qwen3"]), (plain, [None, None])):
        config = EngineConfig.from_keywords(model=folder, **flags)
        decisions = parser_decisions(config, PluginManager())
        assert [decision.winner for decision in decisions] == wanted
        assert "modulm-demo" not in decisions[0].reason


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_only_experts_are_rounded(tmp_path: Path, form: str) -> None:
    folder = make_tiny(tmp_path, "MixtralForCausalLM")
    flags = {"device": "cpu", "quantization": f"experts_{form}", "runner": "generate"}
    with using(PluginManager()) as plugins, LLM(str(folder), **flags) as llm:
        (answer,) = llm.generate(["Hello"], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 4
        assert plugins.find("quantization", f"experts_{form}").source == "hook"
        method, platform = plugins.load("quantization", f"experts_{form}"), CpuPlatform()
    experts = LinearSpec("experts", 64, (32, 32), False, "float32", "expert", experts=4)
    assert method.rejects(experts, platform) is None
    instance = method(method.Config(), platform, bind())
    assert instance.declines(experts) is None
    left = f"experts_{form} leaves linear layers as they are"
    assert instance.declines(evolve(experts, kind="linear", experts=0)) == left
