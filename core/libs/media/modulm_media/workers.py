"""Decode files in separate processes, which may crash or time out.

The processes start with the first file and are replaced when they end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from math import prod
from queue import LifoQueue
from typing import Any
from weakref import finalize

import numpy as np
from attrs import asdict
from PIL import Image

from modulm.errors import QueueFull
from modulm_media.decode_worker import read_head, write_head
from modulm_media.flags import MediaConfig, MediaKind
from modulm_media.limits import LIMITS, Limits, Undecodable
from modulm_media.values import Sound, Video

__all__ = ["DecodeWorkers", "process_count"]

#: Address space of a worker in bytes.
_MEMORY = 4 << 30
#: Seconds allowed for starting a worker, in addition to its first file.
_START = 120.0
#: Files after which a worker is replaced.
_FILES = 1000
_DTYPES = ("|u1", "<f4")


def process_count(flags: MediaConfig) -> int:
    """Number of files decoded at once."""
    return flags.media_decode_processes or min(4, max(1, (os.cpu_count() or 1) // 2))


class DecodeWorkers:
    """At most `count` worker processes. Thread-safe; each thread waits for its own file.

    seconds: time limit per file. memory: address space of a worker in bytes.
    """

    def __init__(self, count: int, seconds: float = 30.0, memory: int = _MEMORY) -> None:
        self._seconds, self._memory = seconds, memory
        self._idle: LifoQueue[_Worker | None] = LifoQueue()
        self._all: set[_Worker] = set()
        for _ in range(count):
            self._idle.put(None)
        finalize(self, _end_all, self._all)

    def decode(
        self,
        kind: MediaKind,
        data: bytes,
        io: Mapping[str, Any],
        limits: Limits = LIMITS,
        reserve: Callable[[int], None] | None = None,
    ) -> Image.Image | Sound | Video:
        """Like `modulm_media.decode.decode`. Raises Undecodable, QueueFull.

        reserve: called with the decoded size in bytes before a file is decoded, by its header; for
        sound again when it is longer. May raise QueueFull.
        """
        worker = self._idle.get()
        try:
            if worker is None or not worker.usable:
                self._forget(worker)
                worker = _Worker(self._memory)
                self._all.add(worker)
            value = worker.ask(kind, data, io, limits, self._seconds, reserve)
        finally:
            if worker is not None and not worker.usable:
                self._forget(worker)
                worker = None
            self._idle.put(worker)
        return value

    @property
    def running(self) -> int:
        """Number of running processes."""
        return len(self._all)

    def close(self) -> None:
        """End the processes; later calls start new ones."""
        _end_all(self._all)

    def _forget(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.end()
            self._all.discard(worker)


class _Full(Exception):
    """A file was refused before it was decoded; the worker waits for the next one."""

    def __init__(self, error: QueueFull) -> None:
        super().__init__(str(error))
        self.error = error


class _Worker:
    """One process."""

    def __init__(self, memory: int) -> None:
        """Raises QueueFull if the machine has no room for a process now."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "modulm_media.decode_worker", str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as error:
            reason = error.strerror
            raise QueueFull(f"no process can be started to decode media: {reason}") from error
        self._files_sent = 0

    @property
    def usable(self) -> bool:
        """Whether the worker accepts another file."""
        return self._files_sent < _FILES and self._process.poll() is None

    def ask(
        self,
        kind: MediaKind,
        data: bytes,
        io: Mapping[str, Any],
        limits: Limits,
        seconds: float,
        reserve: Callable[[int], None] | None,
    ) -> Image.Image | Sound | Video:
        """Decode a file. Raises Undecodable, also if the process had to be ended."""
        late = threading.Event()
        allowed = seconds if self._files_sent else seconds + _START
        timer = threading.Timer(allowed, self._too_late, [late])
        timer.daemon = True
        timer.start()
        self._files_sent += 1
        try:
            head, numbers = self._exchange(kind, data, io, limits, seconds, reserve)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.end()
            if late.is_set():
                raise Undecodable(f"decoding takes more than {seconds:g} s") from error
            raise Undecodable("it cannot be decoded: the decoder crashes") from error
        except _Full as full:  # nothing was decoded
            raise full.error from None
        except BaseException:  # the worker still writes what nobody reads
            self.end()
            raise
        finally:
            timer.cancel()
        if "error" in head:
            raise Undecodable(str(head["error"]))
        return _value(kind, head, numbers)

    def _exchange(
        self,
        kind: MediaKind,
        data: bytes,
        io: Mapping[str, Any],
        limits: Limits,
        seconds: float,
        reserve: Callable[[int], None] | None,
    ) -> tuple[dict[str, Any], np.ndarray]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise OSError("the worker has no pipes")
        request = {"kind": kind, "io": dict(io), "limits": asdict(limits), "size": len(data)}
        write_head(stdin, {**request, "seconds": seconds})
        stdin.write(data)
        stdin.flush()
        head, reserved, full = read_head(stdout), 0, None
        while head is not None and "needs" in head and full is None:
            needed = int(head["needs"])
            reserved += needed
            if needed < 0 or reserved > 8 * limits.room:
                raise ValueError("unexpected size in the response")
            try:
                if reserve is not None:
                    reserve(needed)
            except QueueFull as error:
                full = error
            write_head(stdin, {"granted": full is None})
            stdin.flush()
            head = read_head(stdout)
        if head is None:
            raise OSError("the worker has ended")
        if full is not None:
            raise _Full(full)
        if "error" in head:
            return head, np.empty(0)
        shape, dtype = [int(side) for side in head["shape"]], str(head["dtype"])
        if dtype not in _DTYPES or prod(shape) > 8 * limits.room or min(shape, default=0) < 1:
            raise ValueError("unexpected shape or dtype in the response")
        missing = prod(shape) * np.dtype(dtype).itemsize - reserved
        if reserve is not None and missing > 0:
            reserve(missing)
        numbers = np.empty(shape, dtype)
        room, at = numbers.reshape(-1).view(np.uint8).data, 0
        while at < len(room):
            count = stdout.readinto(room[at:])  # type: ignore[attr-defined]
            if not count:
                raise OSError("the worker has ended")
            at += count
        return head, numbers

    def _too_late(self, late: threading.Event) -> None:
        late.set()
        self._process.kill()

    def end(self) -> None:
        """End the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue


def _value(
    kind: MediaKind, head: Mapping[str, Any], numbers: np.ndarray
) -> Image.Image | Sound | Video:
    if kind == "image":
        return Image.fromarray(numbers)
    if kind == "audio":
        return Sound(numbers, int(head["rate"]))
    fps = head["fps"]
    indices = np.array(head["indices"], dtype=np.int64)
    return Video(numbers, None if fps is None else float(fps), indices, int(head["total"]))


def _end_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.end()
        workers.discard(worker)
