"""Several server processes in front of one engine process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from modulm.testing.checkpoints import make_tiny


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
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


def test_two_servers_one_engine(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny", "LlamaForCausalLM")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--api-server-count", "2", "--cpu-threads", "1"]
    flags += ["--kv-cache-memory-bytes", str(1 << 24), "--shutdown-timeout", "5"]
    server = subprocess.Popen(
        [sys.executable, "-m", "modulm.cli.main", "serve", str(model), *flags]
    )
    url = f"http://127.0.0.1:{port}"
    body = {"model": str(model), "prompt": "Hello", "max_tokens": 8, "temperature": 0}

    def ready() -> bool:
        assert server.poll() is None, "the server ended"
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def ask() -> str:
        answer = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60)
        return str(answer.json()["choices"][0]["text"])

    try:
        until(ready)
        children = descendants(server.pid)
        roles = Counter(
            role for command in children.values() for role in ("engine.process", "server.workers")
            if role in command
        )  # fmt: skip
        assert roles == {"engine.process": 1, "server.workers": 1}
        assert len({ask() for _ in range(12)}) == 1
        worker = next(pid for pid, command in children.items() if "server.workers" in command)
        os.kill(worker, signal.SIGKILL)
        until(lambda: worker not in descendants(server.pid))
        assert len({ask() for _ in range(6)}) == 1
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert not descendants(server.pid)
        for pid in children:
            assert not Path(f"/proc/{pid}").exists()
    finally:
        server.kill()
        server.wait()
