"""Files are decoded in processes that may die: of what is in them, or because they take too long.

They are made when the first file comes, and replaced when they have ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from math import prod
from queue import LifoQueue
from typing import Any
from weakref import finalize

import numpy as np
from attrs import asdict
from PIL import Image

from modulm_media.decode_worker import read_head, write_head
from modulm_media.flags import MediaConfig, MediaKind
from modulm_media.limits import LIMITS, Limits, Undecodable
from modulm_media.values import Sound, Video

__all__ = ["DecodeWorkers", "process_count"]

#: Bytes of addresses of a worker.
_MEMORY = 4 << 30
#: Seconds that its start may take, beside those of the first file.
_START = 20.0
#: Files after which a worker makes room for a fresh one.
_FILES = 1000
_DTYPES = ("|u1", "<f4")


def process_count(flags: MediaConfig) -> int:
    """How many files are decoded at a time."""
    return flags.media_decode_processes or min(4, max(1, (os.cpu_count() or 1) // 2))


class DecodeWorkers:
    """At most `count` worker processes; safe among threads, each of which waits for its file.

    seconds: that one file may take. memory: bytes of addresses that a worker may have.
    """

    def __init__(self, count: int, seconds: float = 30.0, memory: int = _MEMORY) -> None:
        self._seconds, self._memory = seconds, memory
        self._idle: LifoQueue[_Worker | None] = LifoQueue()
        self._all: set[_Worker] = set()
        for _ in range(count):
            self._idle.put(None)
        finalize(self, _end_all, self._all)

    def decode(
        self, kind: MediaKind, data: bytes, io: Mapping[str, Any], limits: Limits = LIMITS
    ) -> Image.Image | Sound | Video:
        """As `modulm_media.decode.decode`. Raises Undecodable."""
        worker = self._idle.get()
        try:
            if worker is None or not worker.usable:
                self._forget(worker)
                worker = _Worker(self._memory)
                self._all.add(worker)
            found = worker.ask(kind, data, io, limits, self._seconds)
        finally:
            if worker is not None and not worker.usable:
                self._forget(worker)
                worker = None
            self._idle.put(worker)
        return found

    @property
    def running(self) -> int:
        """How many processes there are."""
        return len(self._all)

    def close(self) -> None:
        """End the processes; they are made again when they are needed."""
        _end_all(self._all)

    def _forget(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.end()
            self._all.discard(worker)


class _Worker:
    """One process."""

    def __init__(self, memory: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "modulm_media.decode_worker", str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._asked = 0

    @property
    def usable(self) -> bool:
        """Whether it may be asked again."""
        return self._asked < _FILES and self._process.poll() is None

    def ask(
        self, kind: MediaKind, data: bytes, io: Mapping[str, Any], limits: Limits, seconds: float
    ) -> Image.Image | Sound | Video:
        """The value of a file. Raises Undecodable, also when the process has to be ended."""
        late = threading.Event()
        allowed = seconds if self._asked else seconds + _START
        timer = threading.Timer(allowed, self._too_late, [late])
        timer.daemon = True
        timer.start()
        self._asked += 1
        try:
            head, numbers = self._exchange(kind, data, io, limits, seconds)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.end()
            if late.is_set():
                raise Undecodable(f"it takes more than {seconds:g} s to be decoded") from error
            raise Undecodable("it cannot be decoded: whatever tries it fails") from error
        finally:
            timer.cancel()
        if "error" in head:
            raise Undecodable(str(head["error"]))
        return _value(kind, head, numbers)

    def _exchange(
        self, kind: MediaKind, data: bytes, io: Mapping[str, Any], limits: Limits, seconds: float
    ) -> tuple[dict[str, Any], np.ndarray]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise OSError("the worker has no pipes")
        told = {"kind": kind, "io": dict(io), "limits": asdict(limits), "size": len(data)}
        write_head(stdin, {**told, "seconds": seconds})
        stdin.write(data)
        stdin.flush()
        head = read_head(stdout)
        if head is None:
            raise OSError("the worker has ended")
        if "error" in head:
            return head, np.empty(0)
        shape, dtype = [int(side) for side in head["shape"]], str(head["dtype"])
        if dtype not in _DTYPES or prod(shape) > 8 * limits.room or min(shape, default=0) < 1:
            raise ValueError("no such numbers were asked for")
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
