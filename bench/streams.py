"""Many concurrent streams on one server: python bench/streams.py [--streams 1000] [--model demo]

Starts `modulm serve`, opens all streams at the same time, reads each to its end, and prints how
many were complete, the times of the first and the last, and the server's memory and open files
before, at the peak, and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from attrs import define, frozen

PROMPT = "Tell me a short story about a baker called Nora."


@frozen
class Size:
    """Resources of a process: resident memory in MiB, open files."""

    memory: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Size:
        status = Path(f"/proc/{pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(int(resident.split()[1]) // 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())))


@define
class Stream:
    """One stream: seconds to its first and last frame, and whether it was complete."""

    first: float = 0.0
    last: float = 0.0
    whole: bool = False


async def read(port: int, model: str, began: float) -> Stream:
    """Open one stream and read it to the end."""
    stream = Stream()
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": PROMPT}], "stream": True,
         "max_tokens": 48}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    while line := await reader.readline():
        if line.startswith(b"data:"):
            stream.first = stream.first or time.monotonic() - began
            stream.whole = stream.whole or b"[DONE]" in line
    stream.last = time.monotonic() - began
    writer.close()
    return stream


async def watch(pid: int, sizes: list[Size]) -> None:
    """Sample the process every 50 ms until cancelled."""
    while True:
        sizes.append(Size.of(pid))
        await asyncio.sleep(0.05)


async def measure(pid: int, port: int, model: str, count: int) -> None:
    """Open the streams and print the table."""
    before, sizes = Size.of(pid), list[Size]()
    watching = asyncio.create_task(watch(pid, sizes))
    began = time.monotonic()
    streams = await asyncio.gather(*(read(port, model, began) for _ in range(count)))
    watching.cancel()
    await asyncio.sleep(1)
    after = Size.of(pid)
    whole = sum(stream.whole for stream in streams)
    most = Size(max(s.memory for s in sizes), max(s.files for s in sizes))
    print(f"streams {count}, complete {whole}")
    print(f"first frame {min(s.first for s in streams):.2f} to "
          f"{max(s.first for s in streams):.2f} s, last frame at most "
          f"{max(s.last for s in streams):.2f} s")  # fmt: skip
    print("              before    most   after")
    print(f"memory, MiB  {before.memory:7d} {most.memory:7d} {after.memory:7d}")
    print(f"open files   {before.files:7d} {most.files:7d} {after.files:7d}")


def ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers. Raises SystemExit if it ended instead."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server ended with code {process.returncode}")


def main() -> None:
    """Start the server, measure, and stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "modulm.cli.main", "serve", options.model, "--port", str(port),
               "--disable-uvicorn-access-log"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        ready(port, process)
        asyncio.run(measure(process.pid, port, options.model, options.streams))
    finally:
        process.terminate()
        process.wait(timeout=30)


if __name__ == "__main__":
    main()
