"""Standard output and error that nobody reads (reference case F62)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from attrs import define

from modulm_server import output
from modulm_server.output import Outlet, forward

ProcessMaker = Callable[..., tuple[subprocess.Popen[bytes], str]]

#: More than a pipe and a queue of a few KiB hold.
LINES = 5_000


@define
class Pipe:
    """A pipe that nobody reads until `read` is called."""

    reader: int
    writer: int

    def read(self) -> bytes:
        return os.read(self.reader, 1 << 16)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    yield Pipe(reader, writer)
    os.close(reader)
    os.close(writer)


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.005)


def test_what_is_read_comes_whole_and_in_order(pipe: Pipe) -> None:
    outlet = Outlet(pipe.writer)
    for number in range(100):
        outlet.put(b"%d\n" % number)
    assert outlet.flush()
    assert pipe.read() == b"".join(b"%d\n" % number for number in range(100))
    assert outlet.dropped == 0


def test_f62_nobody_waits_for_a_reader_and_drops_are_said(pipe: Pipe) -> None:
    outlet = Outlet(pipe.writer, capacity=4096)
    line, put = b"x" * 99 + b"\n", LINES
    while outlet.flush(0.05):
        put += 40
        for _ in range(40):
            outlet.put(line)
    for _ in range(LINES):
        outlet.put(line)
    dropped = outlet.dropped
    assert dropped > LINES - 80
    received = b""
    while b"nobody read them\n" not in received or received.count(line) < put - dropped:
        received += pipe.read()
    assert f"WARNING modulm: {dropped} lines of output were dropped".encode() in received
    assert (received.count(line), outlet.dropped) == (put - dropped, dropped)


def test_a_reader_that_is_gone_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    outlet = Outlet(writer)
    outlet.put(b"to nobody\n")
    until(lambda: outlet.dropped == 1)
    os.close(writer)


def test_what_a_child_prints_is_forwarded(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to its end, also where nobody reads our own output."""
    outlet = Outlet(pipe.writer, capacity=1 << 16)
    monkeypatch.setattr(output, "outlet", lambda descriptor: outlet)
    child = subprocess.Popen(
        [sys.executable, "-c", "print('x' * 2_000_000 + '\\n', flush=True)"],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    forward(child.stdout).join(300)
    assert child.wait(300) == 0
    assert outlet.dropped > 0
    while not outlet.flush(0.05):  # else the rest is written to whatever has the number next
        pipe.read()


def test_f62_a_server_whose_output_nobody_reads(start_process: ProcessMaker) -> None:
    """Every request logs its prompt and a line of access: far more than a pipe holds."""
    popen, url = start_process("enable_log_requests=True", announced="print('ready', flush=True)")
    with httpx.Client(base_url=url, timeout=300) as client:
        body = {"prompt": "spoken at length " * 300, "truncate_prompt_tokens": 10}
        for _ in range(60):
            assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/health").status_code == 200
        assert b"modulm:log_lines_dropped_total 0.0" in client.get("/metrics").content
    popen.terminate()
    out, log = popen.communicate(timeout=300)
    assert popen.returncode == 0
    assert out == b"ready\n"
    assert log.count(b"POST /v1/completions") == log.count(b": spoken at length") == 60


def test_libraries_that_print_by_themselves_do_not_wait_either() -> None:
    script = """
import os
from modulm_server.output import unblock
unblock()
for _ in range(100):
    try:
        os.write(2, b"x" * 4096)
    except BlockingIOError:
        pass
print("through")
"""
    popen = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert popen.stdout is not None
    assert popen.stdout.read() == b"through\n"
    assert popen.wait(300) == 0
    popen.communicate()


def test_standard_files_keep_what_others_ask_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = io.StringIO()
    monkeypatch.setattr(output, "_unblock_pipe", lambda descriptor: None)
    monkeypatch.setattr(sys, "stdout", foreign)
    monkeypatch.setattr(sys, "stderr", os.fdopen(2, "w", closefd=False))
    output.unblock()
    assert sys.stdout is foreign  # what writes elsewhere is left alone
    monkeypatch.setattr(sys, "stdout", os.fdopen(1, "w", closefd=False))
    output.unblock()
    first = sys.stdout
    output.unblock()
    assert sys.stdout is first
    assert (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    assert sys.stdout.isatty() == os.isatty(1)
    assert sys.stdout.encoding == "utf-8"
    assert sys.stdout.buffer.write(b"") == 0
