"""Many concurrent streams on one server.

    python bench/streams.py [--streams 1000] [--tokens 48] [--model demo | --port PORT]

Starts `modulm serve`, opens all streams at the same time, reads each to its end, and prints how
many were complete, the times of the first and the last, and the server's memory and open files
before, at the peak, and after. With --port, a server that runs on this machine already is read,
whose memory is not shown.
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

CONNECTING = 500  # at a time; a listening socket queues no more
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


async def read(
    port: int, asked: dict[str, object], began: float, connecting: asyncio.Semaphore
) -> Stream:
    """Open one stream and read it to the end. asked: fields of the request."""
    stream = Stream()
    fields = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, **asked}
    body = json.dumps(fields).encode()
    async with connecting:
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


async def read_all(port: int, count: int, asked: dict[str, object]) -> None:
    """Open the streams, read them, and print how it went."""
    began, connecting = time.monotonic(), asyncio.Semaphore(CONNECTING)
    streams = await asyncio.gather(*(read(port, asked, began, connecting) for _ in range(count)))
    print(f"streams {count}, complete {sum(stream.whole for stream in streams)}")
    print(f"first frame {min(s.first for s in streams):.2f} to "
          f"{max(s.first for s in streams):.2f} s, last frame at most "
          f"{max(s.last for s in streams):.2f} s")  # fmt: skip


async def measure(pid: int, port: int, count: int, asked: dict[str, object]) -> None:
    """Read the streams, and print the sizes of the server's process."""
    before, sizes = Size.of(pid), list[Size]()
    watching = asyncio.create_task(watch(pid, sizes))
    await read_all(port, count, asked)
    watching.cancel()
    await asyncio.sleep(1)
    after = Size.of(pid)
    most = Size(max(s.memory for s in sizes), max(s.files for s in sizes))
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
    """Read the options, start the server, measure, and stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asked = {"max_tokens": options.tokens}
    if options.port is not None:
        return asyncio.run(read_all(options.port, options.streams, asked))
    asked["model"] = options.model
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "modulm.cli.main", "serve", options.model, "--port", str(port),
               "--disable-uvicorn-access-log"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        ready(port, process)
        asyncio.run(measure(process.pid, port, options.streams, asked))
    finally:
        process.terminate()
        process.wait(timeout=30)


if __name__ == "__main__":
    main()
