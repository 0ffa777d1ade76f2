"""`modulm run-batch`: every line gets an answer, wrong ones too, also after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click
import pytest

from modulm.cli.main import main
from modulm.config import EngineConfig
from modulm.testing.checkpoints import make_tiny, make_tokenizer
from modulm_command_run_batch.batch import EngineGone, Line, answer_all, read_line, read_lines
from modulm_command_run_batch.files import Answers, check_files, open_lines_of
from modulm_server.app import create_app
from modulm_server.scripted import Reply, ScriptedEngine
from modulm_tokenizers.tokenizer import load_tokenizer


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
    line = read_line(text.encode())
    assert line.problem is not None
    assert problem in line.problem


def test_a_right_line() -> None:
    line = read_line(chat(1).encode())
    assert (line.problem, line.custom_id, line.url) == (None, "id-1", "/v1/chat/completions")


# Files.


def test_answers_are_put_into_the_input_s_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.jsonl"
    with Answers(str(path), [b"a", b"b", b"c"]) as answers:
        for line in (2, 0, 1):
            answers.add(line, {"n": line, "text": "ü"})
        assert answers.finish() == (path, 0)
    assert rows(path) == [{"n": n, "text": "ü"} for n in range(3)]
    assert os.listdir(path.parent) == ["out.jsonl"]


def test_a_second_run_goes_on_after_the_last_whole_answer(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(str(path), [b"a", b"b", b"c"]) as answers:
        answers.add(1, {"n": 1})
        answers.add(0, {"n": 0})
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(partial.read_bytes()[:-3])
    with Answers(str(path), [b"a", b"b", b"c"]) as answers:
        assert answers.done == {1}
        answers.add(2, {"n": 2})
        answers.add(0, {"n": 0})
        answers.finish()
    assert [row["n"] for row in rows(path)] == [0, 1, 2]


def test_answers_of_another_input_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(str(path), [b"a", b"b"]) as answers:
        answers.add(0, {"n": "old"})
    with Answers(str(path), [b"a", b"other"]) as answers:
        assert not answers.done
        answers.add(0, {"n": "new"})
        answers.finish()
    assert rows(path) == [{"n": "new"}]


@pytest.mark.parametrize("suffix", ["", ".partial", ".ready"])
def test_the_input_is_never_written_over(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no name of it, and nothing is opened to find that out."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / f"in{suffix}"
    source.write_text(chat(1))
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("in")
    (tmp_path / "folder").symlink_to("sub/..")
    os.link(source, tmp_path / f"hard{suffix}")
    outputs = ["in", "./in", "sub/../in", "link", "folder/in", "hard", str(tmp_path / "in")]
    source.chmod(0)
    for given in (f"in{suffix}", f"./in{suffix}", str(source)):
        for output in outputs:
            with pytest.raises(click.ClickException, match="is the input"):
                check_files(given, output, None)
        check_files(given, "other", None)
    source.chmod(0o600)
    assert source.read_text() == chat(1)


def test_an_output_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for output in (str(tmp_path), "/dev/null"):
        with pytest.raises(click.ClickException, match="is not a file"):
            check_files(str(tmp_path / "in"), output, None)


def test_the_command_looks_before_it_opens(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(chat(1))
    (tmp_path / "link").symlink_to(source)
    done = subprocess.run(
        [sys.executable, "-m", "modulm.cli.main", "run-batch", "-i", str(source),
         "-o", str(tmp_path / "link")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "is the input" in done.stderr
    assert source.read_text() == chat(1)


def test_every_line_has_one_record() -> None:
    """Whatever bytes it is made of."""
    raw = [b"\xff\xfe", b"[" * 100_000, chat(1).encode(), chat(1).encode() + b"\r", b"{}"]
    problems = [line.problem for line in read_lines(raw)]
    assert [problem is None for problem in problems] == [False, False, True, False, False]
    assert "occurs twice" in str(problems[3])


def test_lines_are_bytes_without_marks_and_blanks(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbf{}\r\n\n \r\n\xff\n[1]")
    assert open_lines_of(str(path)) == [b"{}\r", b"\xff", b"[1]"]


def record(name: str, status: int = 200, error: Any = None) -> dict[str, Any]:
    return {"custom_id": name, "response": {"status_code": status}, "error": error}


def test_resume_takes_what_was_answered_well_from_a_finished_output(tmp_path: Path) -> None:
    path, raw = tmp_path / "out", [chat(n).encode() for n in range(5)]
    records = [record("id-0"), record("id-1", 500, {"message": "x"}), record("id-3"),
               record("id-3"), record("id-9")]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in records) + '{"custom_id": "id-4", ')
    with Answers(str(path), raw, resume=True) as answers:
        answers.take_finished(read_lines(raw))
        assert answers.done == {0, 3}
    with Answers(str(path), raw, resume=True) as answers:
        assert answers.done == {0, 3}
        for place in (1, 2, 4):
            answers.add(place, record(f"id-{place}", 400, {"message": "y"} if place == 4 else None))
        assert answers.finish() == (path, 1)
    assert [row["custom_id"] for row in rows(path)] == [f"id-{n}" for n in range(5)]


def test_beginning_anew_and_going_on(tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    with Answers(path, [b"a", b"b"]) as answers:
        answers.add(0, record("a"))
    with (
        pytest.raises(click.ClickException, match="another input"),
        Answers(path, [b"x"], None, True),
    ):
        pass
    with Answers(path, [b"a", b"b"], None, True) as answers:
        assert answers.done == {0}
        with pytest.raises(click.ClickException, match="another run"), Answers(path, [b"a", b"b"]):
            pass
    with Answers(path, [b"a", b"b"], None, False) as answers:
        assert not answers.done


def test_a_link_to_the_output_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("far")
    with Answers(str(tmp_path / "link"), [b"a"]) as answers:
        answers.add(0, record("a"))
        answers.finish()
    assert (tmp_path / "link").is_symlink()
    assert rows(tmp_path / "far") == [record("a")]


def test_a168_an_output_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(click.ClickException, match="cannot write"),
        Answers(str(tmp_path / "file" / "out"), [b"a"]),
    ):
        pass


def test_a_missing_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="cannot read"):
        open_lines_of(str(tmp_path / "none"))


# With a scripted engine.


def replied(tmp_path: Path, *texts: str) -> tuple[dict[int, dict[str, Any]], ScriptedEngine]:
    """The records of one request for each text; the text says what the engine does."""
    replies = {
        "die": Reply(die_at=0),
        "break": Reply(error_at=0, error=RuntimeError("broken")),
        "hello": Reply("Hello."),
    }
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer", vocab=512))

    def reply(prompt: str, params: Any) -> Reply:
        return next(found for word, found in replies.items() if word in prompt)

    engine = ScriptedEngine(tokenizer, reply)
    served = create_app(engine, EngineConfig.from_keywords(model="M"))
    lines = [
        Line(text, "/v1/completions", {"model": "M", "prompt": text, "max_tokens": 4})
        for text in texts
    ]
    records: dict[int, dict[str, Any]] = {}
    work = answer_all(served, list(enumerate(lines)), at_once=1, key=None, done=records.__setitem__)
    if "die" in texts:
        with pytest.raises(ExceptionGroup) as errors:
            asyncio.run(work)
        assert errors.value.subgroup(EngineGone) is not None
    else:
        asyncio.run(work)
    return records, engine


def test_what_goes_wrong_in_a_line_is_its_record(tmp_path: Path) -> None:
    records, _ = replied(tmp_path, "hello", "break", "hello")
    assert [records[n]["response"]["status_code"] for n in range(3)] == [200, 500, 200]
    assert records[1]["error"]["code"] == "internal_error"
    assert set(records[1]) == {"id", "custom_id", "response", "error"}


def test_lines_after_the_death_of_the_engine_are_left_to_another_run(tmp_path: Path) -> None:
    records, engine = replied(tmp_path, "hello", "die", "hello")
    assert set(records) == {0}
    assert engine.dead is not None


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
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (f"5 requests: 3 answered, 2 failed; see {base}/out")
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
    with pytest.raises(SystemExit, match="1"):
        main(arguments(checkpoint, str(source), str(output), "--runner", "pooling")[3:])
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
    """Its metrics can be read while it runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(chat(n, max_tokens=40, ignore_eos=True) for n in range(24)))
    partial = tmp_path / "out.jsonl.partial"
    command = arguments(checkpoint, str(source), str(output), "--max-num-seqs", "2")
    metrics = ["--enable-metrics", "--port", str(port)]
    first = subprocess.Popen(
        [*command, *metrics], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        text, end = "", time.monotonic() + 300
        while not (text and partial.exists() and partial.read_bytes().count(b"\n") > 3):
            assert first.poll() is None
            assert time.monotonic() < end
            with suppress(OSError):
                address = f"http://127.0.0.1:{port}/metrics"
                text = text or urlopen(address, timeout=300).read().decode()
            time.sleep(0.02)
        assert "# TYPE" in text
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = [json.loads(line) for line in partial.read_bytes().split(b"\n")[1:-1]]
    assert 0 < len(before) < 24
    second = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stderr
    assert "already answered" in second.stderr
    answers = rows(output)
    assert [row["custom_id"] for row in answers] == [f"id-{n}" for n in range(24)]
    kept = {row["id"] for row in answers}
    assert all(row["answer"]["id"] in kept for row in before)
    assert not partial.exists()
