"""An offline LLM tells whoever counts, as a served one does."""

from __future__ import annotations

from pathlib import Path

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny
from modulm_server.engine.metrics import Metrics


def test_an_offline_llm_is_counted_by_whoever_asks(tmp_path: Path) -> None:
    counted = Metrics("m")
    folder = str(make_tiny(tmp_path / "tiny"))
    with LLM(folder, cpu_threads=1, max_model_len=64, num_gpu_blocks_override=8) as llm:
        llm.generate(["a b"], SamplingParams(max_tokens=3, ignore_eos=True))
        assert counted.last is None
        llm.count_by(counted)
        llm.generate(["a b", "c"], SamplingParams(max_tokens=3, ignore_eos=True))
    found = {sample.name: sample.value for family in counted.collect() for sample in family.samples}
    assert found["modulm:generation_tokens_total"] == 6
    assert found["modulm:request_params_n_count"] == 2
