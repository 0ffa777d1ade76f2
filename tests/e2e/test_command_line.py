"""The `modulm` command with a real model: generate, complete, chat, serve, explain."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from modulm.cli.main import main
from modulm.testing.checkpoints import make_tiny

SMALL = ["--cpu-threads", "1", "--kv-cache-memory-bytes", "8M"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cli") / "tiny", "Qwen3ForCausalLM")


def modulm(*args: str, text: str = "", code: int = 0) -> tuple[str, str]:
    """Run the command in this process: its output and what it said on stderr."""
    streams = [TextIOWrapper(BytesIO(part), encoding="utf-8") for part in (text.encode(), b"", b"")]
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = streams
    try:
        main(args)
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    out, told = (_written(stream) for stream in streams[1:])
    assert status == code, told
    return out, told


def _written(stream: TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message is wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")


def test_generate_keeps_order_and_keys(checkpoint: Path, tmp_path: Path) -> None:
    rows = [
        {"id": 1, "messages": [{"role": "user", "content": "hi"}]},
        {"id": 2, "prompt": "hello"},
        {"id": 3, "prompt": [5, 6, 7]},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--max-tokens", "5", "--temperature", "0", "--n", "2", "--ignore-eos", "--no-progress"]
    modulm("generate", "--model", str(checkpoint), "-i", str(source), "-o", str(output),
           *flags, *SMALL)  # fmt: skip
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in answers] == [1, 2, 3]
    assert [row["prompt_tokens"] for row in answers][2] == 3
    assert all([one["tokens"] for one in row["outputs"]] == [5, 5] for row in answers)


def test_generate_reads_standard_input_and_prints_text(checkpoint: Path) -> None:
    flags = ["--max-tokens", "3", "--temperature", "0", "--no-progress", "--chat"]
    first, _ = modulm("generate", "--model", str(checkpoint), *flags, *SMALL, text="hi\n")
    second, _ = modulm("generate", "--model", str(checkpoint), *flags, *SMALL, "hi")
    assert first == second != ""


def test_complete_and_chat_in_this_process(checkpoint: Path) -> None:
    flags = ["--temperature", "0", "--max-tokens", "6", *SMALL]
    plain = ["generate", "--model", str(checkpoint), "--no-progress", "--no-chat"]
    out, _ = modulm(*plain, *flags, "hello")
    same, told = modulm("complete", str(checkpoint), "-q", "hello", "--stats", *flags)
    assert same == out
    assert "tokens in" in told
    chatted, _ = modulm("chat", str(checkpoint), "-q", "hello", *flags)
    again, _ = modulm("generate", "--model", str(checkpoint), "--no-progress", *flags, "hello")
    assert chatted == again


def test_explain_names_owner_and_reason(checkpoint: Path) -> None:
    out, _ = modulm("config", "explain", str(checkpoint), "--seed", "3", "--json")
    rows = {row["flag"]: row for row in json.loads(out)}
    assert rows["seed"] == {"flag": "seed", "value": "3", "from": "--seed"}
    assert "config.json" in rows["max_model_len"]["from"]
    assert rows["device"]["value"] == "cpu"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "/no/such/folder"], "/no/such/folder"),
        (["serve", "--quantization", "nf5"], "nf5"),
        (["serve", "--host", "0.0.0.0"], "--api-key"),
        (["generate", "--model", "/no/such/folder", "x"], "/no/such/folder"),
        (["srve"], "serve"),
    ],
)
def test_what_cannot_start_is_one_line(args: list[str], words: str) -> None:
    out, told = modulm(*args, code=2)
    assert out == ""
    assert words in told.splitlines()[-1]


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    environ = {**os.environ, "MODULM_MAX_NUM_SEQS": "8"}
    running = subprocess.Popen(
        [sys.executable, "-m", "modulm.cli.main", "serve", str(checkpoint), "--port", "0",
         "--served-model-name", "tiny", *SMALL],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip
    assert running.stdout is not None
    line = running.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, line
    yield found.group(), running
    running.kill()
    running.wait()


def test_the_terminal_talks_to_a_server(served: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = served
    flags = ["--url", f"{url}/v1", "--temperature", "0", "--max-tokens", "6", "-q", "hello"]
    assert modulm("chat", *flags)[0]
    assert modulm("complete", *flags)[0]
    _, told = modulm("chat", "--model-name", "other", *flags, code=1)
    assert "404" in told
    assert "other" in told


def test_a_port_in_use_is_one_line(
    served: tuple[str, subprocess.Popen[str]], checkpoint: Path
) -> None:
    port = served[0].rsplit(":", 1)[1]
    _, told = modulm("serve", str(checkpoint), "--port", port, code=2)
    assert port in told
    assert "in use" in told


def test_ctrl_c_ends_the_server_cleanly(served: tuple[str, subprocess.Popen[str]]) -> None:
    _, running = served
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=300)
    assert running.returncode == 0
    assert "Traceback" not in told
