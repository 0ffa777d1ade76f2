"""What a server's log tells: why it refused, how fast it is, and what it runs."""

from __future__ import annotations

import json
import logging
import threading

import httpx
import pytest

from modulm.config import EngineConfig
from modulm.contracts.decision import Decision
from modulm.contracts.executor import ModelDescription
from modulm.contracts.requests import StepStats
from modulm.contracts.tokenizer import Tokenizer
from modulm_server.engine.metrics import Metrics
from modulm_server.flags import ServerConfig
from modulm_server.logs import _Json, _Silent
from modulm_server.scripted import scripted_info
from modulm_server.serve import start_facts
from modulm_server.stat_logger import IntervalStats, StatLogger
from modulm_server.stats_log import LogLine, Statistics


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"temperature": 9}, "400: temperature: "),
        ({"model": "nope\nINFO forged"}, "404: model "),
    ],
)
def test_the_reason_of_a_refusal_is_logged(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, body: dict[str, object], reason: str
) -> None:
    caplog.set_level(logging.INFO, "modulm_server")
    messages = [{"role": "user", "content": "hi"}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, **body})
    assert answer.is_client_error
    (line,) = [line for line in caplog.messages if "rejected" in line]
    assert reason in line
    assert "\n" not in line


def test_an_answer_is_no_refusal(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "modulm_server")
    messages = [{"role": "user", "content": "hi"}]
    assert http.post("/v1/chat/completions", json={"messages": messages}).is_success
    assert not caplog.messages


def test_what_lies_below_a_path_is_silent() -> None:
    drops = _Silent(frozenset({"/health", "/page/*"}))
    for path, is_logged in (
        ("/page/js/app.js?x=1", False), ("/health", False), ("/page", True), ("/healthy", True),
    ):  # fmt: skip
        record = logging.LogRecord(
            "uvicorn.access", 20, "", 1, "", ("c", "GET", path, "1.1", 200), None
        )
        assert drops.filter(record) is is_logged, path


def test_signs_of_life_are_not_logged_unless_asked_for() -> None:
    silent = ServerConfig().disable_access_log_for_endpoints or ()
    assert {"/health", "/metrics"} <= set(silent)
    assert not ServerConfig(
        disable_access_log_for_endpoints="none"
    ).disable_access_log_for_endpoints


STEPS = (
    StepStats(1, 2, 1, 0.25, computed=90, generated=10, queried=80, hit=20),
    StepStats(2, 2, 0, 0.5, computed=30, generated=10),
)


def test_statistics_are_of_the_time_since_the_last_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "modulm_server.stats")
    metrics = Metrics("M")
    statistics = Statistics(metrics, [(LogLine(), "log")])
    statistics.look(100.0)
    for step in STEPS:
        metrics.step(step)
    statistics.look(110.0)
    statistics.look(120.0)
    statistics.close(300.0)
    assert caplog.messages == [
        (
            "Running: 2 reqs, waiting: 0 reqs, prompt throughput: 10.0 tokens/s, "
            "generation throughput: 2.0 tokens/s, "
            "prefix cache hit rate: 25.0 %, KV cache usage: 50.0 %"
        )
    ]


class Collects(StatLogger):
    """Keeps what it gets; fails or waits if it is told to."""

    name = "collects"
    api = 1

    def __init__(self, fault: str = "") -> None:
        self.seen: list[IntervalStats | str] = []
        self.fault = fault
        self.over = threading.Event()

    @classmethod
    def of(cls, config: EngineConfig) -> Collects:
        return cls()

    def record(self, stats: IntervalStats) -> None:
        self.seen.append(stats)
        if self.fault == "exit":
            raise SystemExit(3)
        if self.fault == "hang":
            self.over.wait()

    def close(self) -> None:
        self.seen.append("closed")


def test_a_stat_logger_that_fails_or_hangs_is_named_and_holds_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics("M")
    loggers = [Collects("exit"), Collects("hang"), Collects()]
    named = [(logger, f"stat_loggers/{i} (modulm-a 1.0)") for i, logger in enumerate(loggers)]
    statistics = Statistics(metrics, named)
    for now in (100.0, 110.0, 120.0):
        statistics.look(now)
        metrics.step(STEPS[0])
        for thread in statistics._loggers[::2]:
            if thread._worker is not None:
                thread._worker.join()
    statistics.look(130.0)
    statistics.look(140.0)
    loggers[1].over.set()
    statistics.close(300.0)
    assert [len(logger.seen) for logger in loggers] == [2, 2, 4]
    assert loggers[2].seen[:2] == [IntervalStats(10.0, 80, 10, 80, 20, 2, 1, 0.25)] * 2
    assert [logger.seen[-1] for logger in loggers[1:]] == ["closed", "closed"]
    assert "stat_loggers/0 (modulm-a 1.0) is not called again: record raised SystemExit: 3" in (
        caplog.text
    )
    assert "stat_loggers/1 (modulm-a 1.0) takes longer than an interval" in caplog.text


def test_lines_as_json() -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "", 0, "one\n%s", ("two",), None)
    record.created = 0.0
    assert json.loads(_Json().format(record)) == {
        "time": "1970-01-01T00:00:00.000+00:00",
        "level": "warning",
        "logger": "a.b",
        "message": "one\ntwo",
    }
    assert "\n" not in _Json().format(record)


def test_the_start_says_what_runs(tokenizer: Tokenizer) -> None:
    description = ModelDescription(
        platform="cpu",
        device="a chip",
        weight_bytes=3 << 20,
        decisions=(
            Decision("kernels", (), "fast", ""),
            Decision("quantization", (), "int4", ""),
            Decision("attention (2 heads)", (), "paged", ""),
        ),
    )
    info = scripted_info(tokenizer, description=description, cache_tokens=640, dtype="float32")
    assert start_facts(info) == [
        "device: cpu (a chip)",
        "weights: float32, 3 MiB, quantization int4",
        "kernels: fast; attention paged",
        f"cache: 640 tokens, context {info.max_model_len}",
    ]
