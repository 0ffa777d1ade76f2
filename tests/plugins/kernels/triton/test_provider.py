"""When the kernels are used, how they are cut up, and where the compiled ones are kept."""

from __future__ import annotations

import importlib
import sys

import pytest

import modulm_kernels_triton
from modulm.ops import bind
from modulm.ops.table import twin_ops
from modulm.plugins import manager
from modulm_kernels_triton import device as devices
from modulm_kernels_triton import kept, launch, tuning
from modulm_kernels_triton.provider import TritonKernels


@pytest.fixture
def cpu():
    return manager.current().load("platforms", "cpu")()


@pytest.mark.skipif(not devices.interpreting(), reason="kernels are compiled here")
def test_the_interpreter_runs_on_processors(cpu, ops):
    probe = TritonKernels.probe(cpu)
    assert probe.score > 0
    table = bind([TritonKernels()], dtype="float16")
    assert {name for name, who in table.providers.items() if who == "triton"} >= set(ops)


def test_without_a_gpu_the_probe_says_so(cpu, monkeypatch):
    monkeypatch.setattr(devices, "interpreting", lambda: False)
    probe = TritonKernels.probe(cpu)
    assert probe.score == 0
    assert "needs a GPU" in probe.reason


def test_without_triton_the_probe_says_so(cpu, monkeypatch):
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert "Triton is not installed" in TritonKernels.probe(cpu).reason


def test_old_gpus_are_refused(cpu, monkeypatch):
    class Old:
        device = type("Device", (), {"type": "cuda"})

    monkeypatch.setattr(devices, "interpreting", lambda: False)
    monkeypatch.setattr(devices, "target", lambda: ("cuda", "75"))
    assert "capability 8.0, but this one has 7.5" in TritonKernels.probe(Old).reason


def test_bfloat16_is_refused_where_it_would_be_wrong(monkeypatch):
    provider = TritonKernels()
    assert provider.rejects("rms_norm", dtype="float64") == "rms_norm does not support float64"
    assert provider.rejects("rms_norm", dtype="float32") is None
    monkeypatch.setattr("modulm_kernels_triton.provider.interpreting", lambda: True)
    assert "wrong products" in provider.rejects("rms_norm", dtype="bfloat16")
    monkeypatch.setattr("modulm_kernels_triton.provider.interpreting", lambda: False)
    assert provider.rejects("rms_norm", dtype="bfloat16") is None


def test_importing_the_provider_imports_no_triton(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("triton", "modulm_kernels_triton"):
            monkeypatch.delitem(sys.modules, name)
    importlib.import_module("modulm_kernels_triton.provider")
    assert "triton" not in sys.modules


def test_ops_are_those_of_the_twins(ops):
    without = {"add_lora_blocks", "pack_quantized", "pack_quantized_experts", "low_precision"}
    assert set(ops) - set(twin_ops()) <= without
    assert list(modulm_kernels_triton.FILES) == sorted(modulm_kernels_triton.FILES)


@pytest.fixture
def table(monkeypatch):
    entries = {
        "A fast one": {"k": [{"upto": {"size": 8}, "num_warps": 1}]},
        "cuda 90": {"k": [{"upto": {"size": 64}, "num_warps": 2}, {"num_warps": 3}]},
        "default": {"k": [{"num_warps": 4}], "other": [{"upto": {"size": 4}, "num_warps": 5}]},
    }
    monkeypatch.setattr(tuning, "_table", lambda: entries)
    monkeypatch.setattr(tuning, "_parts", lambda: ["A fast one", "cuda 90", "cuda", "default"])
    tuning.tuned.cache_clear()
    yield
    tuning.tuned.cache_clear()


def test_the_most_particular_entry_that_fits_is_taken(table):
    assert tuning.tuned("k", size=8) == {"num_warps": 1}
    assert tuning.tuned("k", size=9) == {"num_warps": 2}
    assert tuning.tuned("k", size=65) == {"num_warps": 3}
    assert tuning.tuned("other", size=4) == {"num_warps": 5}
    with pytest.raises(KeyError, match="no entry for other"):
        tuning.tuned("other", size=5)


def test_compiled_kernels_are_kept_by_version(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = kept.folder()
    assert here.is_relative_to(tmp_path)
    assert devices.version() in here.name
    monkeypatch.setattr(kept, "version", lambda: "99.0")
    assert kept.folder() != here


def test_no_program_is_started_for_nothing():
    launch.launch(None, (0, 4))
