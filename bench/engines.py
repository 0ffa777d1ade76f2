"""Engines in processes of their own that answer one at a time (see `compare.py`).

An engine is a command that reads a JSON request per line and answers each with a line of JSON, the
first one, without a request, when it is ready. While it has nothing to answer, all processes of its
group are stopped (SIGSTOP), so that threads that wait by spinning take no time from the others.

Groups stay in the session of the caller: if it is killed, they are orphaned, and the system ends
the stopped ones (SIGHUP, then SIGCONT), but not one whose SIGSTOP has not arrived by then.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Seconds that processes get to end by themselves.
_GRACE = 5


class EngineFault(Exception):
    """The engine ended, or exceeded its time. The message is the last line of its log."""


class Engine:
    """A running engine, stopped until it is asked."""

    def __init__(self, command: Sequence[str | Path], limit: float) -> None:
        """Start it. limit: seconds until the first line."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the engine
        self._unread = b""
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,
        )
        try:
            self.first = self._answer(limit)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """Continue the engine for one answer. limit: seconds. Raises EngineFault."""
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise EngineFault(self._last_words()) from None
        answer = self._answer(limit)
        self._signal(signal.SIGSTOP)
        return answer

    def resident(self) -> int:
        """Resident bytes of its processes."""
        pages = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:
                    pages += int((folder / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """End all processes of the engine."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            if file:
                with suppress(OSError):
                    file.close()

    def _answer(self, limit: float) -> dict[str, Any]:
        assert self._process.stdout
        output, end = self._process.stdout.fileno(), time.monotonic() + limit
        while True:
            line, ended, rest = self._unread.partition(b"\n")
            if ended:
                self._unread = rest
                if line.startswith(b"{"):  # libraries may print as they are imported
                    answer: dict[str, Any] = json.loads(line)
                    return answer
                continue
            if not select.select([output], [], [], max(0.0, end - time.monotonic()))[0]:
                raise EngineFault(f"no answer after {limit:g} s")
            found = os.read(output, 1 << 16)
            if not found:
                raise EngineFault(self._last_words())
            self._unread += found

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with {self._process.returncode}"

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def raise_on_termination() -> None:
    """Let SIGTERM end the program like an exception, so that engines are closed."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
