"""The latency of /health and the server's memory under overload.

Each scenario sends its requests from threads of this process, while another process requests
/health every 20 ms. Memory is the peak of the server's process.

    python bench/health_under_load.py [--only WORD]
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Server, serving

CHAT, COMPLETE, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
Bodies = list[tuple[str, bytes]]


def chat(content: Any, **fields: Any) -> tuple[str, bytes]:
    body = {"model": "M", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return CHAT, json.dumps({**body, **fields}).encode()


def plain(path: str, **fields: Any) -> tuple[str, bytes]:
    return path, json.dumps({"model": "M", **fields}).encode()


def scenarios() -> dict[str, Callable[[], Bodies]]:
    text = "All work and no play makes a dull text. "
    lists = b'{"model": "M", "prompt": [' + b"[]," * (16 << 20) + b"0]}"
    integers = b'{"model": "M", "prompt": [' + b"0," * (2_000_000) + b"0]}"
    strings = {f"p{i}": {"type": "string", "maxLength": 5 + i} for i in range(200)}
    return {
        "nothing": list,
        "a message of 50 MB": lambda: [chat(text * (50 << 20 >> 5))],
        "a message of 1 MB": lambda: [chat(text * 26_000)],
        "a part of 1 MB": lambda: [chat([{"type": "text", "text": text * 26_000}])],
        "/tokenize of 10 MB": lambda: [plain(TOKENIZE, prompt=text * 260_000)],
        "/tokenize of 1 MB, 16 times": lambda: [plain(TOKENIZE, prompt=text * 26_000)] * 16,
        "/tokenize of 100 kB, 64 times": lambda: [plain(TOKENIZE, prompt=text * 2_600)] * 64,
        "/tokenize of 8 kB, 500 times": lambda: [plain(TOKENIZE, prompt=text * 200)] * 500,
        "/tokenize of 3 kB, 500 times": lambda: [plain(TOKENIZE, prompt=text * 75)] * 500,
        "2,048 prompts of 4 kB": lambda: [plain(COMPLETE, prompt=[text * 100] * 2048)],
        "48 MB of lists": lambda: [(COMPLETE, lists)],
        "2,000,000 ids": lambda: [(COMPLETE, integers)],
        "/detokenize of 250,000, 8 times": lambda: [
            plain("/detokenize", tokens=[70] * 250_000)] * 8,
        "128 choices with 20 logprobs": lambda: [
            plain(COMPLETE, prompt="a", n=128, logprobs=20, max_tokens=50, ignore_eos=True)],
        "prompt_logprobs, 8 times": lambda: [
            plain(COMPLETE, prompt=text * 60, prompt_logprobs=20, max_tokens=1)] * 8,
        "schemas that take long, 8": lambda: [
            chat("a", structured_outputs={"json": {"type": "object", "properties": strings,
                                                   "required": [*strings, *([f"p{i}"] * i)]}})
            for i in range(8)],
        "grammars that take long, 8": lambda: [
            chat("a", structured_outputs={"regex": "(a{0,300}){0,300}" + "b" * i})
            for i in range(8)],
    }  # fmt: skip


def ask(port: int, path: str, body: bytes, found: Counter[int]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        found[answer.status] += 1
    except OSError:
        found[0] += 1
    finally:
        connection.close()


def load(port: int, bodies: Bodies) -> Counter[int]:
    """Send all requests at once; returns the count of each status, 0 for no answer."""
    found: Counter[int] = Counter()
    threads = [
        threading.Thread(target=ask, args=(port, path, body, found)) for path, body in bodies
    ]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    for thread in threads:
        thread.join()
    return found


def probe(port: int) -> None:
    """Request /health until standard input ends, then print the times in ms as JSON."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    times = []
    while not stop.is_set():
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("GET", "/health")
            good = connection.getresponse().status == 200
        except OSError:
            good = False
        finally:
            connection.close()
        times.append((time.perf_counter() - began) * 1000 if good else 1e6)
        time.sleep(0.02)
    sys.stdout.write(json.dumps(sorted(times)))


def memory(server: Server) -> int:
    """The peak resident memory of the server's process in MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def measure(name: str, make: Callable[[], Bodies]) -> None:
    with serving() as server:
        ask(server.port, *chat("warm up"), Counter())
        bodies = make()
        asking = subprocess.Popen(
            [sys.executable, __file__, "--probe", str(server.port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        time.sleep(0.5)
        began = time.monotonic()
        found = load(server.port, bodies)
        took = time.monotonic() - began
        times = json.loads(asking.communicate()[0])
        middle, late = times[len(times) // 2], times[int(len(times) * 0.99)]
        codes = ", ".join(f"{count} x {code}" for code, count in sorted(found.items())) or "-"
        sys.stdout.write(
            f"| {name} | {codes} | {took:.1f} | {middle:.0f} | {late:.0f} | {times[-1]:.0f} | "
            f"{memory(server)} |\n"
        )
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe(options.probe)
        return
    sys.stdout.write(
        "| scenario | answers | s | /health median, ms | 99 % | longest | MiB |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for name, make in scenarios().items():
        if options.only in name:
            measure(name, make)


if __name__ == "__main__":
    main()
