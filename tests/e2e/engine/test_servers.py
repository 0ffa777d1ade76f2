"""Several server processes in front of one engine process."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from modulm.testing.checkpoints import make_tiny

#: Reading the certificates of all the world for each request would take 20 ms.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def descendants(parent: int) -> dict[int, str]:
    """pid -> command line of the processes that a process started."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and int(state[1]) == parent and state[0] != "Z":
            found[int(entry.name)] = command
    return found


@contextmanager
def serving(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of several processes on a tiny model, and its URL."""
    model = make_tiny(folder / "tiny", "LlamaForCausalLM")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--cpu-threads", "1", "--served-model-name", "M"]
    flags += ["--kv-cache-memory-bytes", str(1 << 24), *more]
    server = subprocess.Popen(
        [sys.executable, "-m", "modulm.cli.main", "serve", str(model), *flags]
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert server.poll() is None, "the server ended"
        try:
            return httpx.get(f"{url}/health", verify=NO_CERTIFICATES).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(ready)
        yield server, url
    finally:
        server.kill()
        server.wait()


def workers(server: subprocess.Popen[bytes]) -> list[int]:
    return [
        pid for pid, line in descendants(server.pid).items() if "modulm_server.api_worker" in line
    ]


def ask(url: str, tokens: int = 8) -> str:
    """On a connection of its own, so that any of the processes may answer."""
    body = {"model": "M", "prompt": "Hello", "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(
        f"{url}/v1/completions",
        json=body | {"ignore_eos": True},
        timeout=600,
        verify=NO_CERTIFICATES,
    )
    body = answer.json()
    return str(body["error"]["code"] if "error" in body else body["choices"][0]["text"])


def total(url: str, name: str) -> float:
    """The sum of a metric's samples."""
    text = httpx.get(f"{url}/metrics", timeout=300, verify=NO_CERTIFICATES).text
    found = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]
    assert found, name
    return sum(found)


@pytest.mark.exhaustive
def test_two_servers_one_engine(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-server-count", "2", "--shutdown-timeout", "5") as (server, url):
        until(lambda: len(workers(server)) == 1)
        children = descendants(server.pid)
        roles = {"engine.engine_process": 1, "modulm_server.api_worker": 1}
        found = Counter(role for line in children.values() for role in roles if role in line)
        assert found == roles
        assert len({ask(url) for _ in range(12)}) == 1
        for _ in range(8):  # whichever process answers
            assert total(url, "modulm:request_success_total") == 12
            assert total(url, "modulm:e2e_request_latency_seconds_count") == 12
            assert total(url, "modulm:generation_tokens_total") == 12 * 8
            assert total(url, "modulm:num_requests_running") == 0
        (worker,) = workers(server)
        os.kill(worker, signal.SIGKILL)
        until(lambda: workers(server) not in ([], [worker]))
        assert len({ask(url) for _ in range(6)}) == 1
        for _ in range(4):
            assert total(url, "modulm:request_success_total") == 18
        children = descendants(server.pid)
        server.send_signal(signal.SIGTERM)
        assert server.wait(300) == 0
        assert not descendants(server.pid)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.exhaustive
def test_all_servers_finish_what_they_do_at_the_same_time(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--api-server-count", "2", "--shutdown-timeout", "20") as (server, url),
        ThreadPoolExecutor(12) as pool,
    ):
        starts: set[float] = set()  # of the processes that have answered
        until(lambda: starts.add(total(url, "process_start_time_seconds")) or len(starts) == 2)
        expected = ask(url, 1900)  # long enough to be seen while they run
        answers = [pool.submit(ask, url, 1900) for _ in range(12)]
        until(lambda: total(url, "modulm:num_requests_running") >= 6)
        server.send_signal(signal.SIGTERM)
        found = Counter(answer.result(600) for answer in answers)
        assert found[expected] >= 6
        assert set(found) <= {expected, "shutting_down"}
        assert server.wait(300) == 0


@pytest.mark.exhaustive
def test_workers_that_die_again_and_again_end_the_service(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-server-count", "2", "--shutdown-timeout", "2") as (server, _):
        dead: set[int] = set()
        while server.poll() is None and len(dead) < 20:
            for pid in set(workers(server)) - dead:
                dead.add(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        assert server.wait(300) == 1
        assert len(dead) == 4
