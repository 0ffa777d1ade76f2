"""Levels, the missing library, and the probe."""

from __future__ import annotations

import ctypes
import json

import pytest
import torch

import modulm_kernels_cpu as kernels
from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm.ops.table import twin_ops
from modulm_kernels_cpu import library as loading
from modulm_kernels_cpu import linear, measured
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
        "low_precision_note",
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
def test_int8_products_are_chosen_by_a_measurement_that_is_kept(slow, monkeypatch, tmp_path):
    """Real products, and a clock that says which ones take longer."""
    ops, now = kernels.ops("scalar"), [0.0]

    def product(x, weight):
        now[0] += 2 if weight.activations == slow else 1
        return ops["linear"](x[:1], weight)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(linear, "perf_counter", lambda: now[0])

    def choices():
        made = linear._low_precision("scalar", ops["pack_quantized"], product)
        return made["low_precision"]("int8"), made["low_precision_note"]("int8")

    expected = slow != "int8", "0.50" if slow != "int8" else "2.00"
    chosen, note = choices()
    assert chosen is expected[0]
    assert note.startswith(f"{expected[1]} of the time of 16 bits")
    assert str(measured.file()) in note
    elapsed = now[0]
    assert choices() == (chosen, note)
    monkeypatch.setattr(measured, "_known", {})  # another process
    assert choices() == (chosen, note)
    assert now[0] == elapsed, "measured once"
    kept = json.loads(measured.file().read_text())
    assert list(kept) == [measured.section()]
    made = linear._low_precision("scalar", ops["pack_quantized"], product)
    assert made["low_precision"]("nvfp4") is None


@pytest.mark.parametrize("content", ["", "[]", '{"machine": 3}', '{"machine": {"int8": []}}'])
def test_a_file_of_measurements_that_is_damaged_is_replaced(content, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "_known", {})
    measured.file().parent.mkdir()
    measured.file().write_text(content)
    assert measured.measure_once("int8", lambda: 0.5) == 0.5
    assert "it is measured again" in caplog.text
    assert json.loads(measured.file().read_text()) == {measured.section(): {"int8": 0.5}}


def test_a_folder_that_cannot_be_written_is_reported(monkeypatch, tmp_path, caplog):
    (tmp_path / "modulm").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "_known", {})
    assert measured.measure_once("int8", lambda: 0.25) == 0.25
    assert "each process measures for itself" in caplog.text


def test_measurements_are_of_a_processor_and_its_threads(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert measured.section(file).startswith("Some CPU @ 2 GHz, ")
    assert f"{torch.get_num_threads()} threads" in measured.section(tmp_path / "none")
