"""The server as a process, with a real engine on a tiny checkpoint: start, answers, end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from attrs import define
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.errors import CheckpointError, ConfigError
from modulm_server.flags import ServerConfig
from modulm_server.serve import open_socket, serve

CHAT = "/v1/chat/completions"


@define
class Process:
    """A server of its own."""

    popen: subprocess.Popen[bytes]
    url: str
    log: Path

    def end(self, sig: int = signal.SIGTERM) -> int:
        self.popen.send_signal(sig)
        return self.popen.wait(300)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def started(folder: Path, *options: str) -> Iterator[Process]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder.parent / f"server-{port}.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as sink:
        popen = subprocess.Popen(
            [
                sys.executable, "-m", "modulm.cli.main", "serve", str(folder), "--port", str(port),
                "--served-model-name", "M", "--max-model-len", "256",
                "--engine-heartbeat-timeout", "300", *options,
            ],
            stdout=sink,
            stderr=sink,
            env=environment,
            start_new_session=True,
        )  # fmt: skip
    process = Process(popen, f"http://127.0.0.1:{port}", log)
    try:
        end = time.monotonic() + 300
        while not healthy(process.url):
            if popen.poll() is not None or time.monotonic() > end:
                pytest.fail(log.read_text())
            time.sleep(0.1)
        yield process
    finally:
        if popen.poll() is None:
            popen.kill()
            popen.wait()


@pytest.fixture(scope="module")
def process(tiny_folder: Path) -> Iterator[Process]:
    with started(tiny_folder, "--shutdown-timeout", "20") as process:
        yield process


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {
        "model": "M",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }
    return httpx.post(url + CHAT, json=body, timeout=300)


def text_of(answer: httpx.Response) -> str:
    parts = [p for p in answer.text.split("\n\n") if p.startswith("data: {")]
    return "".join(json.loads(p[6:])["choices"][0]["delta"].get("content", "") for p in parts)


def test_c05_streamed_equals_whole_equals_completion(process: Process) -> None:
    whole = ask(process.url).json()
    content = whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 8
    assert text_of(ask(process.url, stream=True)) == content
    client = httpx.Client(base_url=process.url, timeout=300)
    messages = [{"role": "user", "content": "hi"}]
    prompt = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": prompt}).json()["prompt"]
    for prompt_form in (prompt, text):
        body = {"model": "M", "prompt": prompt_form, "max_tokens": 8, "temperature": 0}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == content


def test_the_openai_client_talks_to_the_engine(process: Process) -> None:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="x") as client:
        answer = client.chat.completions.create(
            model="M", messages=[{"role": "user", "content": "hi"}], max_tokens=4, logprobs=True
        )
        assert answer.choices[0].logprobs is not None
        many = client.completions.create(
            model="M", prompt=["a", "b"], n=2, max_tokens=3, temperature=1, seed=7
        )
        again = client.completions.create(
            model="M", prompt=["a", "b"], n=2, max_tokens=3, temperature=1, seed=7
        )
    assert [c.text for c in many.choices] == [c.text for c in again.choices]


def test_the_engine_is_measured(process: Process) -> None:
    ask(process.url)
    text = httpx.get(f"{process.url}/metrics").text
    assert 'modulm:num_requests_running{engine="0",model_name="M"} 0.0' in text
    assert "modulm:generation_tokens_total" in text
    beyond = 'modulm:model_memory_beyond_estimate_bytes{model_name="M"}'
    end = time.monotonic() + 300
    while beyond not in text and time.monotonic() < end:  # the first scrape begins to estimate
        time.sleep(0.2)
        text = httpx.get(f"{process.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    held = float(values['modulm:model_memory_bytes{model_name="M"}'])
    assert 0 <= float(values[beyond]) < held


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stop_token_ids": [512]}, "stop_token_ids"), ({"top_logprobs": 21, "logprobs": True}, None)],
)
def test_the_engine_refuses_like_the_fake(
    process: Process, fields: dict[str, Any], param: str | None
) -> None:
    answer = ask(process.url, **fields)
    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] == param


def listening(pid: int) -> set[str]:
    """Local addresses that a process listens on over TCP, as Linux' tables spell them."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux' process table")
def test_a035_only_the_api_listens_and_only_on_loopback(process: Process) -> None:
    """Between the processes there is a socket in a folder that nobody else may enter."""
    port = f"{int(process.url.rpartition(':')[2]):04X}"
    pids = children(process.popen.pid)
    assert pids
    assert listening(process.popen.pid) == {f"0100007F:{port}"}
    for pid in pids:
        assert not listening(pid)
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"key" not in command
    table = Path(f"/proc/{process.popen.pid}/net/unix").read_text()
    folders = {Path(path) for path in re.findall(r"(/\S*/modulm-[^/\s]+)/engine$", table, re.M)}
    assert folders
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders if folder.exists())


def begun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`modulm serve` with arguments that cannot work."""
    return subprocess.run(
        [sys.executable, "-m", "modulm.cli.main", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_f41_a_port_in_use_is_one_clear_line(tiny_folder: Path, process: Process) -> None:
    port = process.url.rpartition(":")[2]
    done = begun(str(tiny_folder), "--port", port)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"modulm: port: 127.0.0.1:{port} is in use: choose another port with --port"
    ]


def test_a_model_that_is_not_there_is_one_clear_line() -> None:
    done = begun("NO_SUCH_MODEL", "--port", "0")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("modulm: model 'NO_SUCH_MODEL' is neither a folder nor a hub id")


@pytest.mark.parametrize("text", [None, "a: [b", "- a"])
def test_a_file_that_cannot_be_used_is_one_clear_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "flags.yaml"
    if text is not None:
        path.write_text(text)
    done = begun("--config", str(path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Error: --config: ")
    assert str(path) in done.stderr.splitlines()[-1]


def test_what_is_wrong_is_known_before_there_is_an_engine(tiny_folder: Path) -> None:
    def never(config: EngineConfig) -> Any:
        pytest.fail("an engine was made")

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for flags, error in (
            ({"model": "NO_SUCH_MODEL", "port": 0}, CheckpointError),
            ({"model": str(tiny_folder / "no"), "port": 0}, CheckpointError),
            ({"model": str(tiny_folder), "port": port}, ConfigError),
            ({"model": str(tiny_folder), "host": "0.0.0.0", "port": 0}, ConfigError),
            ({"model": str(tiny_folder), "port": 0, "ssl_certfile": "no"}, ConfigError),
            ({"model": str(tiny_folder), "port": 0, "ssl_keyfile": "no"}, ConfigError),
            ({"model": str(tiny_folder), "port": 0, "chat_template": "/no.jinja"}, ConfigError),
        ):
            with pytest.raises(error):
                serve(EngineConfig.from_keywords(**flags), never, print)


def test_f41_addresses_that_cannot_be_used(tmp_path: Path) -> None:
    def opened(**flags: Any) -> Any:
        return open_socket(EngineConfig.from_keywords(**flags).group(ServerConfig))

    plain = tmp_path / "file"
    plain.write_text("")
    with pytest.raises(ConfigError, match="in use"):
        opened(uds=str(plain))
    with pytest.raises(ConfigError, match="host"):
        opened(host="no.such.host.invalid", port=0)
    path = tmp_path / "socket"
    first = opened(uds=str(path))
    first.close()
    opened(uds=str(path)).close()


@parametrize_sample("number", [signal.SIGTERM, signal.SIGHUP], every=2)
def test_f13_sigterm_and_sighup_let_running_requests_finish(
    tiny_folder: Path, number: signal.Signals
) -> None:
    with started(tiny_folder, "--shutdown-timeout", "30") as server:
        url = server.url + CHAT
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "M", "messages": messages, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url, json={**body, "max_tokens": 60}, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            # A terminal sends SIGHUP to all its processes.
            send = os.killpg if number is signal.SIGHUP else os.kill
            send(server.popen.pid, number)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" or rest[-1] == "data: [DONE]"
        assert not any('"error"' in line for line in rest)
        assert server.popen.wait(300) == 0


@pytest.mark.exhaustive
def test_f14_sigterm_without_patience_ends_streams_with_an_error(tiny_folder: Path) -> None:
    with started(tiny_folder, "--shutdown-timeout", "0") as server:
        url = server.url + CHAT
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "M", "messages": messages, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url, json={**body, "max_tokens": 240}, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.popen.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        if '"finish_reason":"length"' not in rest[-2]:
            assert json.loads(rest[-2][6:])["error"]["code"] == "shutting_down"
        assert server.popen.wait(300) == 0


#: Two seconds of probes, one each 50 ms: what whoever watches /health may miss.
_PROBES = 40


def probes_until_dead(url: str) -> int:
    """How many probes of /health it takes until one says that the engine is gone."""
    with httpx.Client() as client:
        for count in range(1, 20 * _PROBES):
            if client.get(f"{url}/health").status_code == 503:
                return count
            time.sleep(0.05)
    pytest.fail("/health never noticed")


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux' process table")
def test_f16_the_death_of_the_engine_is_seen(tiny_folder: Path) -> None:
    with started(tiny_folder) as server:
        engines = [
            pid
            for pid in children(server.popen.pid)
            if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
            or b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        if not engines:
            pytest.skip("the engine runs in the server's own process here")
        url = server.url + CHAT
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "M", "messages": messages, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url, json={**body, "max_tokens": 240}, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            for pid in engines:
                os.kill(pid, signal.SIGKILL)
            seen = probes_until_dead(server.url)
            rest = [line for line in lines if line]
        assert seen <= _PROBES
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["code"] == "engine_dead"
        assert server.popen.wait(300) == 1
