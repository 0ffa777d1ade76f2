"""What became of drafted tokens: in answers, in /metrics, and in the reports of `modulm bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm_command_bench.command import command
from modulm_command_bench.drafts import Drafts
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.engine.metrics import Metrics
from modulm_server.testing import Live, serve_in_thread

#: The embedded model goes on with what repeats itself.
PROMPT = [5, 6, 7, 8, 9, 10] * 20
ASK = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "hi hi hi hi hi hi"}],
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
SMALL = {
    "model": "demo", "max_model_len": 256, "num_gpu_blocks_override": 60, "cpu_threads": 1,
    "engine_heartbeat_timeout": 300.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    config = EngineConfig.from_keywords(**SMALL, speculative_config=SPECULATION)
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as server:
            yield server
    finally:
        engine.shutdown()


def counted(live: Live) -> dict[str, float]:
    """The server's own counts: name and place -> value."""
    with live.client() as http:
        lines = http.get("/metrics").text.splitlines()
    counts: dict[str, float] = {}
    for line in lines:
        if line.startswith("modulm:spec_decode") and "_created" not in line:
            head, value = line.rsplit(" ", 1)
            name = head.partition("{")[0].removeprefix("modulm:spec_decode_")
            position = head.partition('position="')[2].partition('"')[0]
            counts[name + position] = float(value)
    return counts


def sent(live: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with live.client() as http:
        if not body.get("stream"):
            return dict(http.post(path, json=body).raise_for_status().json())
        lines = http.post(path, json=body).raise_for_status().text.splitlines()
    chunks = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return dict(json.loads(chunks[-1]))


@parametrize_sample(
    ("path", "ask", "stream"),
    [
        ("/v1/completions", ASK, False), ("/v1/completions", ASK, True),
        ("/v1/chat/completions", CHAT, True), ("/v1/chat/completions", CHAT, False),
    ],
    every=2,
)  # fmt: skip
def test_an_answer_tells_what_became_of_its_drafts(live, path, ask, stream) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    assert "metrics" not in sent(live, path, {**ask, **more})
    before = counted(live)
    body = sent(live, path, {**ask, **more, "include_metrics": True})
    metrics = body["metrics"]["speculative_decoding"]
    after = {name: value - before.get(name, 0) for name, value in counted(live).items()}
    assert metrics["num_spec_tokens"] == 4
    assert "per_step_drafted" not in metrics
    assert after["num_drafts_total"] == metrics["num_spec_steps"] > 0
    assert after["num_draft_tokens_total"] == metrics["num_draft_tokens"]
    assert after["num_accepted_tokens_total"] == metrics["num_accepted_draft_tokens"]
    steps = metrics["acceptance_histogram"]
    for index in range(4):
        name = f"num_accepted_tokens_per_pos_total{index}"
        assert after.get(name, 0) == sum(steps[index + 1 :])
    drafted, accepted = metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]
    assert metrics["draft_acceptance_rate"] == pytest.approx(accepted / drafted)
    assert metrics["mean_acceptance_length"] == pytest.approx(
        1 + accepted / metrics["num_spec_steps"]
    )
    if path == "/v1/completions":
        assert accepted > 0


def test_none_of_several_choices_and_none_without_drafts(live) -> None:
    several = {**ASK, "n": 2, "temperature": 1, "include_metrics": True}
    assert sent(live, "/v1/completions", several)["metrics"] == {"speculative_decoding": None}
    off = {**ASK, "speculative": False, "include_metrics": True}
    metrics = sent(live, "/v1/completions", off)["metrics"]["speculative_decoding"]
    assert (metrics["num_spec_steps"], metrics["mean_acceptance_length"]) == (0, 1.0)


def test_the_server_may_tell_every_request_and_each_step(live) -> None:
    config = EngineConfig.from_keywords(**SMALL, per_request_spec_decode_metrics="detailed")
    with serve_in_thread(live.engine, config) as server:
        metrics = sent(server, "/v1/completions", ASK)["metrics"]["speculative_decoding"]
    assert sum(metrics["per_step_accepted"]) == metrics["num_accepted_draft_tokens"]
    assert sum(metrics["per_step_drafted"]) == metrics["num_draft_tokens"]


def test_the_server_may_tell_how_long_each_step_of_a_request_took(live) -> None:
    config = EngineConfig.from_keywords(**SMALL, enable_per_request_metrics=True)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    with serve_in_thread(live.engine, config) as server:
        for path, ask in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
            assert "metrics" not in sent(server, path, ask)
            for more in ({}, usage):
                body = sent(server, path, {**ask, **more, "include_metrics": True})
                times, tokens = body["metrics"], body["usage"]["completion_tokens"]
                assert 0 <= times["queue_time_ms"] <= times["time_to_first_token_ms"]
                assert times["mean_itl_ms"] * (tokens - 1) == pytest.approx(
                    times["generation_time_ms"]
                )
                assert times["tokens_per_second"] * times["mean_itl_ms"] == pytest.approx(1000)


def test_bench_reports_it(live, tmp_path) -> None:
    before, file = counted(live), tmp_path / "result.json"
    items = [
        "serve", "--base-url", live.url, "--model", "demo", "--num-prompts", "4",
        "--random-input-len", "24", "--random-output-len", "48", "--ignore-eos", "--disable-tqdm",
        "--temperature", "0", "--save-result", "--result-filename", str(file),
    ]  # fmt: skip
    outcome = CliRunner().invoke(command, items, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    result, after = json.loads(file.read_text()), counted(live)
    # One more request goes first, to see that it works.
    drafts = after["num_drafts_total"] - before["num_drafts_total"]
    assert 0 < result["spec_decode_num_drafts"] < drafts
    rates = result["spec_decode_per_position_acceptance_rates"]
    assert sum(rates) == pytest.approx(result["spec_decode_acceptance_length"] - 1)
    assert "spec decode acceptance length" in outcome.output


def test_bench_reports_it_for_a_model_in_the_process(tmp_path) -> None:
    file = tmp_path / "result.json"
    items = [
        "latency", "--model", "demo", "--max-model-len", "256", "--num-gpu-blocks-override", "60",
        "--input-len", "40", "--output-len", "40", "--batch-size", "1", "--num-iters", "1",
        "--num-iters-warmup", "0", "--speculative-config", json.dumps(SPECULATION),
        "--output-json", str(file),
    ]  # fmt: skip
    outcome = CliRunner().invoke(command, items, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(file.read_text())
    assert result["spec_decode_draft_tokens"] >= result["spec_decode_num_drafts"] > 0
    assert "tokens a step" in outcome.output


def test_what_came_between_two_counts() -> None:
    before, after = Drafts(4, 9, 3, (3,)), Drafts(10, 30, 12, (8, 4))
    assert after.since(before) == Drafts(6, 21, 9, (5, 4))
    assert Drafts().figures() == {}


@pytest.mark.exhaustive
def test_places_are_added_up_over_steps() -> None:
    from modulm.contracts.requests import StepStats

    metrics = Metrics("m")
    for at in ((2, 1), (), (3, 3, 1)):
        metrics.step(StepStats(1, 1, 0, 0.0, drafts=3, drafted=9, accepted=sum(at), accepted_at=at))
    counts = {
        sample.labels.get("position", sample.name): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert [counts[position] for position in "012"] == [5, 4, 1]
    assert counts["modulm:spec_decode_num_drafts_total"] == 9
    assert counts["modulm:spec_decode_num_accepted_tokens_total"] == 10
