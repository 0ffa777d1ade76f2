"""An offline LLM tells whoever counts, as a served one does."""

from __future__ import annotations

import time
from pathlib import Path

from modulm import LLM, SamplingParams
from modulm.contracts.outputs import Finished, RequestMetrics
from modulm.testing.checkpoints import make_tiny
from modulm_server.engine.metrics import Metrics
from modulm_server.metrics import exposition, merged


def test_an_offline_llm_is_counted_by_whoever_asks(tmp_path: Path) -> None:
    counted = Metrics("m")
    folder = str(make_tiny(tmp_path / "tiny"))
    with LLM(folder, cpu_threads=1, max_model_len=64, num_gpu_blocks_override=8) as llm:
        llm.generate(["a b"], SamplingParams(max_tokens=3, ignore_eos=True))
        assert counted.last is None
        llm.count_by(counted)
        llm.generate(["a b", "c"], SamplingParams(max_tokens=3, ignore_eos=True))
    samples = {
        sample.name: sample.value for family in counted.collect() for sample in family.samples
    }
    assert samples["modulm:generation_tokens_total"] == 6
    assert samples["modulm:request_params_n_count"] == 2


def samples_of(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Values by the values of the labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == name
    }


def ended(adapter: str | None, prompt: int = 5, generated: int = 3) -> Finished:
    times = RequestMetrics(0.0)
    return Finished(times, SamplingParams(), prompt, [generated], ["stop"], adapter)


def test_requests_are_counted_by_the_adapters_that_they_name() -> None:
    metrics = Metrics("m", adapters=2)
    metrics.finished(ended("sql"))
    assert not [family for family in metrics.collect() if "adapter" in family.name]
    metrics.in_use = lambda: (["b", "a", "b"], ["sql"])
    metrics.finished(ended("sql", 7))
    metrics.finished(ended("poet"))
    metrics.finished(ended(None))
    both = {("m", "0", "sql"): 2.0, ("m", "0", "poet"): 1.0}
    assert samples_of(metrics, "modulm:adapter_requests_total") == both
    assert samples_of(metrics, "modulm:adapter_prompt_tokens_total")["m", "0", "sql"] == 12
    assert samples_of(metrics, "modulm:adapter_generation_tokens_total")["m", "0", "poet"] == 3
    ((labels, moment),) = samples_of(metrics, "modulm:lora_requests_info").items()
    assert labels == ("2", "a,b", "sql")
    assert abs(moment - time.time()) < 3600
    for number in range(1500):
        metrics.finished(ended(f"found{number}"))
    counted = samples_of(metrics, "modulm:adapter_requests_total")
    assert len(counted) == 1001
    assert sum(counted.values()) == 1503
    assert counted["m", "0", "(others)"] == 502


def test_each_server_process_says_which_adapters_its_requests_use() -> None:
    def told(running: str) -> str:
        metrics = Metrics("m", adapters=2)
        metrics.in_use = lambda: ([], [running])
        metrics.finished(ended("sql"))
        return exposition(metrics.registry())[0].decode()

    text = merged(told("a").encode(), [told("b"), told("a")], Metrics.SHARED).decode()
    assert text.count('running_lora_adapters="a"') == 1
    assert text.count('running_lora_adapters="b"') == 1
    assert 'adapter_requests_total{adapter="sql",engine="0",model_name="m"} 3.0' in text
