"""Levels, the missing library, and the probe."""

from __future__ import annotations

import pytest

import modulm_kernels_cpu as kernels
from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm.ops.table import twin_ops
from modulm_kernels_cpu import library as loading
from modulm_kernels_cpu.probe import instruction_rates, read_bandwidth


def test_levels_are_ordered_and_the_best_is_the_default():
    assert kernels.levels()[0] == "scalar"
    assert kernels.load().level == kernels.levels()[-1]
    assert set(kernels.levels()) <= set(kernels.LEVELS)


def test_unknown_and_missing_levels(monkeypatch):
    with pytest.raises(ValueError, match="level must be one of scalar"):
        kernels.load("sse9")
    monkeypatch.setattr(kernels, "__path__", [])
    with pytest.raises(ImportError, match=r"libmodulm_cpu_avx2\.so.*C\+\+ compiler"):
        loading._path("avx2")


def test_a_model_runs_on_the_level_that_the_options_name(level):
    options = {"kernels": {"cpu": {"level": level}}}
    params = SamplingParams(max_tokens=8, temperature=0)
    try:
        with LLM("demo", max_model_len=64, plugin_config=options) as llm:
            assert kernels.load().level == level
            (output,) = llm.generate(["The capital of France"], params, use_tqdm=False)
    finally:
        kernels.use(None)
    assert output.outputs[0].text == " is Paris."
    assert kernels.load().level == kernels.levels()[-1]


def test_a_level_that_does_not_run_here_is_refused():
    with pytest.raises(ConfigError, match=r"kernels\.cpu.*this machine runs scalar.*'sse9'"):
        LLM("demo", plugin_config={"kernels": {"cpu": {"level": "sse9"}}})
    with pytest.raises(ValueError, match="this processor runs|level must be"):
        kernels.use("sse9")


def test_ops_have_the_names_of_twins():
    extra = set(kernels.ops()) - set(twin_ops())
    assert extra == {
        "embedding_packed",
        "pack_quantized",
        "plan_attention",
        "pack_quantized_experts",
        "qkv_prepare",
    }


def test_probe(library):
    assert read_bandwidth(library, 1 << 22) > 0
    assert instruction_rates(library)["fma"] > 0
