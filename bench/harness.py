"""Shared by the soak tests: server processes, their resource usage, and a small HTTP client."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

#: Seconds that a server may take to start, or to answer a question about itself, on a busy machine.
STARTING = float(os.environ.get("MODULM_BENCH_STARTING", "600"))


@frozen
class Held:
    """Resource usage of processes: anonymous memory in KiB, open files, threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def by(cls, pids: Sequence[int]) -> Held:
        """Add up the usage of these processes; ended ones count as zero."""
        memory = files = threads = 0
        for pid in pids:
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                files += len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
            found = {line.partition(":")[0]: line.split() for line in status.splitlines()}
            memory += int(found["RssAnon"][1]) if "RssAnon" in found else 0
            threads += int(found["Threads"][1])
        return cls(memory, files, threads)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = tasks.read_text().split()
        except OSError:
            continue
        for child in children:
            found += family(int(child))
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def shared_files(pids: Sequence[int]) -> set[str]:
    """The files in /dev/shm that these processes map."""
    files = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        files |= {line.split(None, 5)[5] for line in maps.splitlines() if " /dev/shm/" in line}
    return {file for file in files if not file.endswith(" (deleted)")}


def alive(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def many_files() -> None:
    """Raise the limit of open files as far as permitted."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@define(eq=False)
class Server:
    """A `modulm serve` process."""

    process: subprocess.Popen[bytes]
    port: int
    model: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def family(self) -> list[int]:
        """The ids of all its processes."""
        return family(self.process.pid)

    def part(self, word: str) -> int:
        """The first of its processes whose command contains the word. Raises LookupError."""
        for pid in self.family():
            if word in command_of(pid):
                return pid
        raise LookupError(f"no process of the server has {word!r} in its command")

    def get(self, path: str, seconds: float = 10.0) -> tuple[int, bytes]:
        """A plain GET: (status, body); status 0 if nothing answers."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=seconds) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def wait(self) -> None:
        """Wait until the server answers. Raises SystemExit if it ends or does not start."""
        latest = time.monotonic() + STARTING
        while self.get("/health", 2.0)[0] != 200:
            code = self.process.poll()
            if code is not None:
                raise SystemExit(f"the server ended with code {code} before it answered")
            if time.monotonic() > latest:
                raise SystemExit(f"the server did not answer within {STARTING:.0f} s")
            time.sleep(0.05)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@contextmanager
def serving(
    *flags: str, model: str = "demo", wait: bool = True, **options: Any
) -> Iterator[Server]:
    """Start a server, later stop it with SIGTERM. `options`: of Popen; stderr is dropped."""
    port = free_port()
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
    process = subprocess.Popen(
        [sys.executable, "-m", "modulm.cli.main", "serve", model, "--port", str(port),
         "--served-model-name", "M", "--disable-uvicorn-access-log", *flags],
        **options,
    )  # fmt: skip
    server = Server(process, port, "M")
    try:
        if wait:
            server.wait()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@define(eq=False)
class Reply:
    """A response: the status and the received part of the body."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(factory=dict)

    def json(self) -> Any:
        return json.loads(self.body)


class Lost(Exception):
    """The connection ended before the answer did."""


@define(eq=False)
class Client:
    """Sends requests, each on a new connection."""

    port: int
    host: str = "127.0.0.1"

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> AsyncGenerator[tuple[int, dict[str, str], asyncio.StreamReader], None]:
        """Send a request; yields (status, headers, reader of the body). Leaving disconnects."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            if body or method == "POST":
                head += f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n"
            writer.write(head.encode() + b"\r\n" + body)
            await writer.drain()
            first = await reader.readline()
            if not first:
                raise Lost("no answer")
            headers = {}
            while (line := (await reader.readline()).strip()) != b"":
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            yield int(first.split()[1]), headers, reader
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise Lost(str(error) or type(error).__name__) from error
        finally:
            writer.transport.abort()

    async def ask(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> Reply:
        """Return the whole response. `body`: bytes, or a value to encode as JSON."""
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        async with self.open(method, path, data, kind) as (status, headers, reader):
            return Reply(status, await whole(headers, reader), headers)

    async def stream(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event. Raises Refused if the response is not a stream."""
        async with self.open("POST", path, json.dumps(body).encode()) as (status, headers, reader):
            if status != 200:
                raise Refused(Reply(status, await whole(headers, reader), headers))
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    yield line[6:].strip()


class Refused(Exception):
    """The response is not a stream; `reply` has the error."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"{reply.status}: {reply.body[:200]!r}")
        self.reply = reply


async def whole(headers: dict[str, str], reader: asyncio.StreamReader) -> bytes:
    """Read a body to its end. Raises Lost if it is shorter than its Content-Length."""
    if "content-length" in headers:
        try:
            return await reader.readexactly(int(headers["content-length"]))
        except asyncio.IncompleteReadError as error:
            raise Lost("the answer was cut short") from error
    found = bytearray()
    while (size := int((await reader.readline()).strip() or b"0", 16)) > 0:
        found += await reader.readexactly(size)
        await reader.readline()
    return bytes(found)


def form(name: str, content: bytes, purpose: str = "batch") -> tuple[bytes, str]:
    """Build the body and content type of a file upload."""
    edge = "modulm-soak-edge"
    body = (
        (
            f'--{edge}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
            f'--{edge}\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n'
            "content-type: application/octet-stream\r\n\r\n"
        ).encode()
        + content
        + f"\r\n--{edge}--\r\n".encode()
    )
    return body, f"multipart/form-data; boundary={edge}"
