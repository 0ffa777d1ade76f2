"""`modulm tune` measures, writes its table, and kernels read it."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.fixture
def kept(tmp_path, monkeypatch):
    from modulm_kernels_triton import tuning

    file = tmp_path / "tuning.json"
    monkeypatch.setattr(tuning, "kept_file", lambda: file)
    yield file
    tuning._table.cache_clear()
    tuning.tuned.cache_clear()


@pytest.mark.exhaustive
def test_constants_are_measured_and_read(kept, device):
    from modulm_kernels_triton import tune, tuning
    from modulm_kernels_triton.ahead import Sizes

    sizes = Sizes(32, 32, 2, 1, 16, torch.float32, torch.float32)
    said = []
    entries = tune.tune(sizes, device, tiny=True, told=said.append)
    names = ["linear", "fused_experts", "rms_norm", "attention_split", "attention_prompt"]
    assert list(entries) == names
    tried = {
        problem.kernel: problem.candidates for problem in tune.problems(sizes, device, tiny=True)
    }
    for kernel, (entry,) in entries.items():
        assert {k: v for k, v in entry.items() if k != "upto"} in tried[kernel]
    assert sum("2 of 2 ran" in line for line in said) == len(names)
    kept.write_text(json.dumps({tuning.section(): {"linear": [{"upto": {"M": 7}, "BM": 99}]}}))
    tuning._table.cache_clear()
    tuning.tuned.cache_clear()
    assert tuning.tuned("linear", M=7, BYTES=4) == {"BM": 99}
    assert tuning.tuned("linear", M=8, BYTES=4) != {"BM": 99}


def test_a_broken_table_is_reported(kept, caplog):
    from modulm_kernels_triton import tuning

    kept.write_text("{")
    tuning._table.cache_clear()
    tuning.tuned.cache_clear()
    assert tuning.tuned("rms_norm", BLOCK=64)["num_warps"]
    assert "run modulm tune again" in caplog.text
