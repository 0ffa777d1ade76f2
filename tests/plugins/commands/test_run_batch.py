"""`modulm run-batch`: every line gets an answer, wrong ones too, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click
import pytest

from modulm.testing.checkpoints import make_tiny
from modulm_command_run_batch.batch import read_line
from modulm_command_run_batch.files import Answers, read_lines


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("batch") / "tiny", "Qwen3ForCausalLM")


def chat(number: int, **body: Any) -> str:
    messages = [{"role": "user", "content": f"number {number}"}]
    return json.dumps(
        {
            "custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "tiny", "messages": messages, "max_tokens": 4, **body},
        }
    )  # fmt: skip


def arguments(checkpoint: Path, source: str, output: str, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "modulm.cli.main", "run-batch", "-i", source, "-o", output,
        "--model", str(checkpoint), "--served-model-name", "tiny", "--no-progress",
        "--kv-cache-memory-bytes", "8M", "--cpu-threads", "1",
        "--disable-frontend-multiprocessing", *more,
    ]  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Lines.


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not json", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"url": "/v1/chat/completions", "body": {}}', "custom_id"),
        ('{"custom_id": 5, "url": "/v1/chat/completions", "body": {}}', "custom_id"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/models", "body": {}}', "method"),
        ('{"custom_id": "a", "body": {}}', "url"),
        ('{"custom_id": "a", "url": "/metrics", "body": {}}', "url"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "body.stream"),
    ],
)
def test_wrong_lines_say_what_is_wrong(text: str, problem: str) -> None:
    line = read_line(text)
    assert line.problem is not None
    assert problem in line.problem


def test_a_right_line() -> None:
    line = read_line(chat(1))
    assert (line.problem, line.custom_id, line.url) == (None, "id-1", "/v1/chat/completions")


# Files.


def test_answers_are_put_into_the_input_s_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.jsonl"
    with Answers(str(path), ["a", "b", "c"]) as answers:
        for line in (2, 0, 1):
            answers.add(line, {"n": line, "text": "ü"})
        assert answers.finish() == path
    assert rows(path) == [{"n": n, "text": "ü"} for n in range(3)]
    assert os.listdir(path.parent) == ["out.jsonl"]


def test_a_second_run_goes_on_after_the_last_whole_answer(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(str(path), ["a", "b", "c"]) as answers:
        answers.add(1, {"n": 1})
        answers.add(0, {"n": 0})
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(partial.read_bytes()[:-3])
    with Answers(str(path), ["a", "b", "c"]) as answers:
        assert answers.done == {1}
        answers.add(2, {"n": 2})
        answers.add(0, {"n": 0})
        answers.finish()
    assert [row["n"] for row in rows(path)] == [0, 1, 2]


def test_answers_of_another_input_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(str(path), ["a", "b"]) as answers:
        answers.add(0, {"n": "old"})
    with Answers(str(path), ["a", "other"]) as answers:
        assert not answers.done
        answers.add(0, {"n": "new"})
        answers.finish()
    assert rows(path) == [{"n": "new"}]


def test_a_missing_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="cannot read"):
        read_lines(str(tmp_path / "none"))


# With a model.


class Store(BaseHTTPRequestHandler):
    """A place that files are fetched from and put to."""

    files: dict[str, bytes] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        body = self.files[self.path]
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.files[self.path] = body
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def store() -> Iterator[tuple[str, dict[str, bytes]]]:
    server = HTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Store.files
    server.shutdown()
    server.server_close()


def test_urls_errors_and_keys(
    checkpoint: Path, store: tuple[str, dict[str, bytes]], tmp_path: Path
) -> None:
    base, files = store
    other = json.loads(chat(9))
    other["url"] = "/v1/completions"
    other["body"] = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    lines = [chat(0), "", "broken", chat(1, max_tokens=-1), json.dumps(other), chat(2)]
    files["/in"] = "\n".join(lines).encode()
    done = subprocess.run(
        arguments(checkpoint, f"{base}/in", f"{base}/out", "--api-key", "secret",
                  "--output-tmp-dir", str(tmp_path)),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in files["/out"].decode().splitlines()]
    assert [row["custom_id"] for row in answers] == ["id-0", None, "id-1", "id-9", "id-2"]
    codes = [row["response"]["status_code"] for row in answers]
    assert codes == [200, 400, 400, 200, 200]
    assert [row["error"] is None for row in answers] == [True, False, False, True, True]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert "max_tokens" in answers[2]["error"]["message"]
    assert os.listdir(tmp_path) == []


def test_embeddings(checkpoint: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": name, "url": "/v1/embeddings", "body": {"model": "tiny", "input": given}}
        for name, given in (("one", "hello"), ("two", ["hello", "bye"]), ("none", []))
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + chat(5) + "\n")
    done = subprocess.run(
        arguments(checkpoint, str(source), str(output), "--runner", "pooling"),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two, none, five = rows(output)
    first = one["response"]["body"]["data"][0]["embedding"]
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-3)
    many = [entry["embedding"] for entry in two["response"]["body"]["data"]]
    assert many[0] == pytest.approx(first, abs=1e-5)
    assert many[1] != many[0]
    assert none["response"]["status_code"] == 400
    assert "input" in none["error"]["message"]
    assert five["error"] is not None


def test_a_killed_batch_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(chat(n, max_tokens=40, ignore_eos=True) for n in range(24)))
    partial = tmp_path / "out.jsonl.partial"
    command = arguments(checkpoint, str(source), str(output), "--max-num-seqs", "2")
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not (partial.exists() and partial.read_bytes().count(b"\n") > 3):
            assert first.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = [json.loads(line) for line in partial.read_bytes().split(b"\n")[1:-1]]
    assert 0 < len(before) < 24
    second = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stderr
    assert "answered already" in second.stderr
    answers = rows(output)
    assert [row["custom_id"] for row in answers] == [f"id-{n}" for n in range(24)]
    kept = {row["id"] for row in answers}
    assert all(row["answer"]["id"] in kept for row in before)
    assert not partial.exists()


def test_metrics_while_it_runs(checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(chat(n, max_tokens=100, ignore_eos=True) for n in range(40)))
    running = subprocess.Popen(
        arguments(checkpoint, str(source), str(tmp_path / "out"), "--enable-metrics",
                  "--port", str(port), "--max-num-seqs", "1"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        text, end = "", time.monotonic() + 120
        while not text:
            assert time.monotonic() < end
            assert running.poll() is None
            try:
                text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            except OSError:
                time.sleep(0.02)
        assert "# TYPE" in text
    finally:
        running.kill()
        running.wait()
