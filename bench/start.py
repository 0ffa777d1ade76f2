"""Time from `modulm serve` to the first token, and the memory used then.

    python bench/start.py MODEL [--kv-gib 1] [-- FLAGS OF SERVE]

Seconds are of one cold process with the checkpoint in the page cache. Memory is the proportional
set size (PSS) of all processes of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], check=True, capture_output=True, text=True
    ).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, its in pairs if its == parent]
    return found


def memory(pid: int) -> int:
    """PSS in bytes of a process and its descendants."""
    total = 0
    for one in family(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def first_token(server: subprocess.Popen[bytes], address: str, began: float) -> tuple[float, float]:
    """Seconds until /health answers, and until the first token of a stream."""
    with httpx.Client(base_url=address, timeout=60) as client:
        while True:
            if server.poll() is not None:
                raise SystemExit("the server ended; run the same command to see why")
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health").status_code == 200:
                    break
            time.sleep(0.02)
        ready = time.perf_counter() - began
        body = {"prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            next(line for line in answer.iter_lines() if line.startswith("data: {"))
            return ready, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--kv-gib", type=float, default=1.0)
    parser.add_argument("flags", nargs="*", help="more flags of serve, after --")
    options = parser.parse_args()
    port, cache = free_port(), int(options.kv_gib * 2**30)
    command = [sys.executable, "-m", "modulm", "serve", options.model, "--port", str(port)]
    command += ["--kv-cache-memory-bytes", str(cache), *options.flags]
    began = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready, token = first_token(server, f"http://127.0.0.1:{port}", began)
        held = memory(server.pid)
    finally:
        server.terminate()
        server.wait()
    weights = sum(os.path.getsize(file) for file in Path(options.model).glob("*.safetensors"))
    figures = {"ready_s": ready, "first_token_s": token, "memory_gb": held / 1e9}
    if weights:
        figures["beyond_weights_and_cache_gb"] = (held - weights - cache) / 1e9
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
