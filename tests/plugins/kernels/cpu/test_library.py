"""Levels, the missing library, and the probe."""

from __future__ import annotations

import ctypes

import pytest

import modulm_kernels_cpu as kernels
from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm.ops.table import twin_ops
from modulm_kernels_cpu import library as loading
from modulm_kernels_cpu import linear
from modulm_kernels_cpu.probe import instruction_rates, read_bandwidth
from modulm_kernels_cpu.provider import CpuKernels
from modulm_platform_cpu.platform import CpuPlatform


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
    with pytest.raises(ConfigError, match=r"kernels\.cpu.*level must be one of scalar.*'sse9'"):
        LLM("demo", plugin_config={"kernels": {"cpu": {"level": "sse9"}}})
    with pytest.raises(ValueError, match="level must be one of scalar"):
        kernels.use("sse9")


def test_the_best_level_and_one_to_fall_back_on_are_built():
    assert {"scalar", loading.runnable()[-1]} <= set(kernels.levels())


@pytest.mark.parametrize("name", kernels.LEVELS)
def test_a_level_is_what_its_name_says(name):
    if name not in loading.runnable():
        pytest.skip(f"this processor does not run {name}")
    if name not in kernels.levels():
        pytest.skip(f"{name} was not built; all levels: {loading.BUILD_ALL}")
    assert kernels.load(name).call("level", "", ctypes.c_char_p)() == name.encode()


@pytest.fixture
def gappy(monkeypatch):
    """A processor that runs three levels, of which the middle one was not built."""
    monkeypatch.setattr(loading, "runnable", lambda: ("scalar", "avx2", "avx512"))
    monkeypatch.setattr(loading, "levels", lambda: ("scalar", "avx512"))


def test_a_level_that_was_not_built_is_refused_and_one_that_cannot_run(gappy):
    with pytest.raises(ValueError, match=r"avx2 was not built; built: scalar, avx512; .*=all make"):
        loading.load("avx2")
    with pytest.raises(ValueError, match="this CPU supports scalar, avx2, avx512, not amx"):
        loading.load("amx")


def test_kernels_built_on_a_lesser_processor_say_so(monkeypatch):
    assert "not built" not in CpuKernels.probe(CpuPlatform()).reason
    monkeypatch.setattr(loading, "levels", lambda: ("scalar",))
    monkeypatch.setattr(loading, "runnable", lambda: ("scalar", "avx2"))
    assert "level scalar at best; avx2 was not built" in CpuKernels.probe(CpuPlatform()).reason


def test_ops_have_the_names_of_twins():
    extra = set(kernels.ops()) - set(twin_ops())
    assert extra == {
        "blank_linear",
        "embedding_packed",
        "low_precision",
        "overwrite_bias",
        "overwrite_experts",
        "overwrite_linear",
        "pack_block_experts",
        "pack_blocks",
        "pack_quantized",
        "paged_attention",
        "pick_tokens",
        "plan_attention",
        "pack_quantized_experts",
        "packed_form",
        "qkv_prepare",
        "round_groups",
        "selected_attention",
        "write_kv",
    }


def test_probe(library):
    assert read_bandwidth(library, 1 << 22) > 0
    assert instruction_rates(library)["fma"] > 0


@pytest.mark.parametrize("slow", linear.ACTIVATIONS)
def test_int8_products_are_chosen_by_measurement(slow, monkeypatch):
    """Real products, and a clock that says which ones take longer."""
    ops, now = kernels.ops("scalar"), [0.0]

    def product(x, weight):
        now[0] += 2 if weight.activations == slow else 1
        return ops["linear"](x, weight)

    monkeypatch.setattr(linear, "perf_counter", lambda: now[0])
    ability = linear._low_precision(ops["pack_quantized"], product)
    assert ability("int8") is (slow != "int8")
    measured = now[0]
    assert ability("int8") is (slow != "int8")
    assert now[0] == measured, "measured once"
    assert ability("nvfp4") is None
