"""How soon /health reports that the engine was killed, and how the server's process ends.

python bench/engine_death.py --runs 3
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx


def status(client: httpx.Client, url: str) -> int | None:
    """The status of /health; None if nothing listens."""
    try:
        return client.get(f"{url}/health").status_code
    except httpx.TransportError:
        return None


def engine_of(server: int) -> int:
    """The process id of the engine that a server has started."""
    tasks = Path(f"/proc/{server}/task").glob("*/children")
    for pid in (int(word) for task in tasks for word in task.read_text().split()):
        if b"modulm.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise SystemExit("the server has no engine process")


def measure() -> str:
    """Run one server from start to end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-m", "modulm.cli.main", "serve", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with httpx.Client(trust_env=False) as client:
        while status(client, url) != 200:
            if server.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.02)
        up = time.monotonic() - began
        killed = time.monotonic()
        os.kill(engine_of(server.pid), signal.SIGKILL)
        while status(client, url) != 503:
            time.sleep(0.001)
        seen = time.monotonic() - killed
    code = server.wait(60)
    ended = time.monotonic() - killed
    return (
        f"ready after {up:.2f} s; 503 after {seen * 1000:.1f} ms; exit {code} after {ended:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    for _ in range(parser.parse_args().runs):
        print(measure(), flush=True)


if __name__ == "__main__":
    main()
