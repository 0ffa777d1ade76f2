"""Traces: what a collector receives. It is a process of its own that takes OTLP over HTTP as any
collector does; there is none in the registries that this project builds from."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import modulm
from modulm.config.sources import keywords
from modulm.contracts.outputs import Finished
from modulm.contracts.request_listener import RequestListener
from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm_hooks_otlp.spans import Spans, exporter_of
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, serve_in_thread

COLLECTOR = """
import gzip, json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest, ExportTraceServiceResponse,
)

class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        told = MessageToDict(ExportTraceServiceRequest.FromString(body))
        with open(sys.argv[1], "a") as sink:
            sink.write(json.dumps([self.path, told]) + "\\n")
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass

server = HTTPServer(("127.0.0.1", 0), Collector)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Collector:
    """The process, and what it was sent."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.process = subprocess.Popen(
            [sys.executable, "-c", COLLECTOR, str(file)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def spans(self) -> list[dict[str, Any]]:
        """All spans until now, attributes as a plain table, with their service's name."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        found = []
        for path, told in map(json.loads, lines):
            assert path == "/v1/traces"
            for resource in told["resourceSpans"]:
                service = plain(resource["resource"]["attributes"])["service.name"]
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        table = plain(span.get("attributes", []))
                        found.append({**span, "attributes": table, "service": service})
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {one["key"]: value_of(one["value"]) for one in attributes}


def value_of(told: dict[str, Any]) -> Any:
    ((kind, value),) = told.items()
    if kind == "arrayValue":
        return [value_of(one) for one in value["values"]]
    return int(value) if kind == "intValue" else value


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    made = Collector(tmp_path_factory.mktemp("collector") / "spans")
    yield made
    made.close()


@pytest.fixture(scope="module")
def live(collector: Collector) -> Iterator[Live]:
    """A real server of the embedded model that sends its traces to the collector."""
    config = keywords(
        model="demo", max_model_len=128, disable_frontend_multiprocessing=True,
        otlp_traces_endpoint=collector.url, served_model_name="small",
    ).config  # fmt: skip
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live:
            yield live
    finally:
        engine.shutdown()


def sent(live: Live, collector: Collector, wanted: str) -> list[dict[str, Any]]:
    """The spans of one trace, when they were sent."""
    for listener in live.engine._output_processor._listeners:
        assert isinstance(listener, Spans)
        assert listener.provider.force_flush()
    deadline = time.monotonic() + 300
    while True:
        found = [span for span in collector.spans() if span["traceId"] == wanted]
        if found:
            return found
        assert time.monotonic() < deadline, collector.spans()
        time.sleep(0.02)


def trace(number: int) -> tuple[str, str]:
    """The id of a trace in hexadecimal, and as the collector tells it."""
    raw = bytes([number]) * 16
    return raw.hex(), base64.b64encode(raw).decode()


@pytest.mark.parametrize(
    ("number", "path", "operation", "stream"),
    [(1, "/v1/chat/completions", "chat", False), (2, "/v1/completions", "text_completion", True)],
)
def test_a_request_is_a_span_of_the_callers_trace(
    live: Live, collector: Collector, number: int, path: str, operation: str, stream: bool
) -> None:
    name, told = trace(number)
    body = {"model": "small", "max_tokens": 6, "temperature": 0.5, "top_p": 0.9, "seed": 4,
            "stop": ["nothing"], "stream": stream}  # fmt: skip
    body |= {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {
        "prompt": "One two"}  # fmt: skip
    with live.client(timeout=300) as http:
        answer = http.post(path, json=body, headers={"traceparent": f"00-{name}-{'ab' * 8}-01"})
    assert answer.status_code == 200
    spans = {span["name"]: span for span in sent(live, collector, told)}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    whole = spans["llm_request"]
    assert whole["parentSpanId"] == "q6urq6urq6s="
    assert whole["kind"] == "SPAN_KIND_SERVER"
    assert whole["service"] == "modulm"
    assert all(
        spans[part]["parentSpanId"] == whole["spanId"] for part in spans.keys() - {"llm_request"}
    )
    begin, end = int(whole["startTimeUnixNano"]), int(whole["endTimeUnixNano"])
    assert abs(end / 1e9 - time.time()) < 600
    places = [int(spans[part][key]) for part in ("queue", "prefill", "decode")
              for key in ("startTimeUnixNano", "endTimeUnixNano")]  # fmt: skip
    assert begin == places[0]
    assert places == sorted(places)
    assert places[-1] <= end
    facts = whole["attributes"]
    assert facts["gen_ai.operation.name"] == operation
    assert facts["gen_ai.request.model"] == "small"
    assert facts["gen_ai.request.temperature"] == 0.5
    assert facts["gen_ai.request.top_p"] == 0.9
    assert facts["gen_ai.request.max_tokens"] == 6
    assert facts["gen_ai.request.seed"] == 4
    assert facts["gen_ai.request.stop_sequences"] == ["nothing"]
    assert facts["gen_ai.response.finish_reasons"][0] in ("stop", "length")
    assert facts["gen_ai.usage.input_tokens"] > 0
    assert facts["gen_ai.usage.input_tokens"] == facts["gen_ai.usage.prompt_tokens"]
    assert facts["http.route"] == path
    if not stream:
        usage = answer.json()["usage"]
        assert facts["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert facts["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    waited, first = (
        facts["gen_ai.latency.time_in_queue"],
        facts["gen_ai.latency.time_to_first_token"],
    )
    assert 0 <= waited <= first <= facts["gen_ai.latency.e2e"]
    parts = (facts["gen_ai.latency.time_in_model_prefill"]
             + facts["gen_ai.latency.time_in_model_decode"])  # fmt: skip
    assert parts == pytest.approx(facts["gen_ai.latency.time_in_model_inference"])


def test_prompts_of_one_call_are_spans_of_one_trace(live: Live, collector: Collector) -> None:
    name, told = trace(3)
    body = {"model": "small", "prompt": ["One", "Two", "Three"], "max_tokens": 2, "n": 2}
    with live.client(timeout=300) as http:
        http.post("/v1/completions", json=body, headers={"traceparent": f"00-{name}-{'cd' * 8}-01"})
    spans = [span for span in sent(live, collector, told) if span["name"] == "llm_request"]
    assert len(spans) == 3
    assert {span["attributes"]["gen_ai.usage.num_sequences"] for span in spans} == {2}
    assert {span["attributes"]["gen_ai.usage.output_tokens"] for span in spans} == {4}


def test_what_the_caller_does_not_record_is_not_recorded(live: Live, collector: Collector) -> None:
    (quiet, told), (loud, heard) = trace(4), trace(5)
    body = {"model": "small", "prompt": "One", "max_tokens": 1}
    with live.client(timeout=300) as http:
        for name, flags in ((quiet, "00"), (loud, "01")):
            header = {"traceparent": f"00-{name}-{'ab' * 8}-{flags}"}
            http.post("/v1/completions", json=body, headers=header)
    assert sent(live, collector, heard)
    assert not [span for span in collector.spans() if span["traceId"] == told]


def test_a_wrong_header_begins_a_trace_of_its_own(live: Live, collector: Collector) -> None:
    before = len(collector.spans())
    body = {"model": "small", "prompt": "One", "max_tokens": 1}
    with live.client(timeout=300) as http:
        answer = http.post("/v1/completions", json=body, headers={"traceparent": "nonsense"})
    assert answer.status_code == 200
    live.engine._output_processor._listeners[0].provider.force_flush()
    new = [span for span in collector.spans()[before:] if span["name"] == "llm_request"]
    assert len(new) == 1
    assert "parentSpanId" not in new[0]


@pytest.mark.exhaustive
def test_a_program_of_ones_own(collector: Collector) -> None:
    """`LLM(...)` sends the spans that are left when the process ends."""
    code = (
        "import modulm, sys\n"
        "with modulm.LLM('demo', max_model_len=64, otlp_traces_endpoint=sys.argv[1]) as llm:\n"
        "    llm.generate('One', modulm.SamplingParams(max_tokens=2), use_tqdm=False)\n"
    )
    before = len(collector.spans())
    subprocess.run([sys.executable, "-c", code, collector.url], check=True)
    new = [span for span in collector.spans()[before:] if span["name"] == "llm_request"]
    assert len(new) == 1
    assert new[0]["attributes"]["gen_ai.operation.name"] == "text_completion"


@pytest.mark.exhaustive
def test_without_the_flag_nothing_of_it_is_there() -> None:
    """No listener, no middleware, and no import of OpenTelemetry's SDK."""
    code = (
        "import sys, modulm\n"
        "llm = modulm.LLM('demo', max_model_len=64)\n"
        "llm.generate('One', modulm.SamplingParams(max_tokens=1), use_tqdm=False)\n"
        "assert not llm._output_processor._listeners\n"
        "print(sorted(n for n in sys.modules if n.startswith('opentelemetry.sdk')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_listener_that_fails_is_told_of_no_more(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    class Fails(RequestListener):
        def ended(self, request: Finished) -> None:
            told.append(request.id)
            raise RuntimeError("no")

    with modulm.LLM("demo", max_model_len=64) as llm:
        llm._output_processor._listeners = [Fails()]
        for _ in range(2):
            llm.generate("One", modulm.SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(told) == 1
    assert "failed and was removed" in caplog.text


def test_wrong_addresses() -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        keywords(model="demo", otlp_traces_endpoint="localhost:4317")
    with pytest.raises(ConfigError, match="opentelemetry-exporter-otlp-proto-grpc"):
        exporter_of("grpc://localhost:4317")


def test_the_banner_says_where_they_go(collector: Collector) -> None:
    config = keywords(model="demo", otlp_traces_endpoint=collector.url).config
    lines = manager.current().gather("modulm_report_header", config=config)
    assert f"traces: {collector.url}" in lines
    assert not manager.current().gather(
        "modulm_report_header", config=keywords(model="demo").config
    )


def test_an_address_without_a_path_is_the_collectors() -> None:
    assert exporter_of("http://a:4318")._endpoint == "http://a:4318/v1/traces"
    assert exporter_of("http://a:4318/own")._endpoint == "http://a:4318/own"
