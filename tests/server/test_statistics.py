"""An offline LLM tells whoever counts, as a served one does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from modulm import LLM, SamplingParams
from modulm.contracts.outputs import Finished, RequestMetrics
from modulm.contracts.requests import StepStats
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny
from modulm_server.engine.histograms import bucket_bounds
from modulm_server.engine.metrics import Metrics
from modulm_server.flags import ServerConfig
from modulm_server.metrics import ToolCallMetrics, exposition, merged, with_prefixes


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


def test_the_drafter_is_a_label() -> None:
    labels = {"method": "suffix", "num_speculative_tokens": "16"}
    chosen = samples_of(Metrics("m", drafts=labels), "modulm:spec_decode_info")
    assert chosen == {("m", "0", "suffix", "16"): 1}
    assert not samples_of(Metrics("m"), "modulm:spec_decode_info")


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


#: Series that the boards of vLLM's examples query, without `vllm:`.
BOARDS = [
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count", "prompt_tokens_total", "generation_tokens_total",
    "inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count", "request_time_per_output_token_seconds_bucket",
    "num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum", "time_to_first_token_seconds_count", "kv_cache_usage_perc",
    "request_prompt_tokens_bucket", "request_prompt_tokens_sum", "request_prompt_tokens_count",
    "request_generation_tokens_bucket", "request_generation_tokens_sum",
    "request_generation_tokens_count", "request_success_total", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_bucket", "request_max_num_generation_tokens_sum",
    "request_max_num_generation_tokens_count", "iteration_tokens_total_bucket",
    "prefix_cache_hits_total", "prefix_cache_queries_total", "num_preemptions_total",
]  # fmt: skip


def test_boards_made_for_vllm_find_their_series() -> None:
    metrics = Metrics("m")
    metrics.finished(ended(None))
    text = exposition(metrics.registry())[0]
    both = with_prefixes(text, ("modulm", "vllm")).decode()
    names = {line.partition("{")[0] for line in both.splitlines() if not line.startswith("#")}
    assert {f"vllm:{name}" for name in BOARDS} <= names
    assert {f"modulm:{name}" for name in BOARDS} <= names
    assert "modulm:" not in with_prefixes(text, ("vllm",)).decode()
    assert 'model_name="m"' in both


def test_requests_say_what_was_cached_and_preempted() -> None:
    metrics = Metrics("m")
    times = RequestMetrics(0.0)
    metrics.finished(
        Finished(
            times, SamplingParams(n=2), 5, [3, 7], ["stop"] * 2, cached=4, preemptions=2, loaded=1
        )
    )
    metrics.finished(Finished(times, SamplingParams(), 5, [0], ["abort"]))  # it never ran
    labels = ("m", "0")
    assert samples_of(metrics, "modulm:prompt_tokens_cached_total") == {labels: 4}
    assert samples_of(metrics, "modulm:request_prefill_kv_computed_tokens_sum") == {labels: 1}
    assert samples_of(metrics, "modulm:request_num_preemptions_sum") == {labels: 2}
    assert samples_of(metrics, "modulm:request_num_preemptions_count") == {labels: 1}
    assert samples_of(metrics, "modulm:request_max_num_generation_tokens_sum") == {labels: 7}
    sources = samples_of(metrics, "modulm:prompt_tokens_by_source_total")
    assert {source: count for (*_, source), count in sources.items()} == {
        "local_compute": 1, "local_cache_hit": 3, "external_kv_transfer": 1,
    }  # fmt: skip
    stage = "num_requests_kv_fetch_by_stage"
    metrics.parts({f"{stage}/in_progress": 2, "kv_block_lifetime_seconds": [1.0, 2.5], "x/y": 1})
    metrics.parts({f"{stage}/in_progress": -1})
    metrics.step(StepStats(1, running=1, waiting=5, usage=0.5, deferred=2))
    waiting = samples_of(metrics, "modulm:num_requests_waiting_by_reason")
    assert {reason: count for (*_, reason), count in waiting.items()} == {
        "capacity": 3, "deferred": 2,
    }  # fmt: skip
    assert samples_of(metrics, f"modulm:{stage}")["m", "0", "in_progress"] == 1
    assert samples_of(metrics, "modulm:kv_block_lifetime_seconds_sum") == {labels: 3.5}
    metrics.forget_now()
    assert not any(samples_of(metrics, f"modulm:{stage}").values())
    metrics.set_sleep(2)
    states = samples_of(metrics, "modulm:engine_sleep_state")
    assert states == {
        (*labels, "awake"): 0, (*labels, "weights_offloaded"): 0, (*labels, "discard_all"): 1,
    }  # fmt: skip


def test_buckets_are_set_by_group() -> None:
    bounds = bucket_bounds({"request_latency": [0.1, 1]})
    metrics = Metrics("m", buckets=bounds)
    metrics.finished(ended(None))
    les = {
        labels[-1] for labels in samples_of(metrics, "modulm:e2e_request_latency_seconds_bucket")
    }
    assert les == {"0.1", "1.0", "+Inf"}
    assert len(samples_of(metrics, "modulm:time_to_first_token_seconds_bucket")) > 3
    for wrong in ({"latency": [1]}, *({"request_tokens": x} for x in ([], [2, 1], [0, 1], [1, 1]))):
        with pytest.raises(ConfigError, match="custom_histogram_buckets"):
            bucket_bounds(wrong)
    with pytest.raises(ConfigError, match="metrics_prefix"):
        ServerConfig(metrics_prefix=("a b",))


def test_outputs_that_a_tool_parser_read_are_counted() -> None:
    calls = ToolCallMetrics()
    for called in (True, False, True):
        calls.add("chat", streamed=True, called=called)
    (family,) = calls.collect()
    counts = {tuple(sample.labels.values()): sample.value for sample in family.samples}
    assert counts["streaming", "tool_call", "chat"] == 2
    assert counts["streaming", "no_tool_call", "chat"] == 1
