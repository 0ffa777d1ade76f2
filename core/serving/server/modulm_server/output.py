"""Non-blocking standard output and standard error.

A pipe holds 64 KiB. Writing to a full one blocks, often while holding the lock of a log handler,
which soon blocks the whole process. So one thread writes, everybody else only fills its queue, and
lines that do not fit into the queue are dropped and counted.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import cache
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Outlet", "dropped_lines", "forward", "outlet", "unblock"]

#: Maximum bytes in the queue, and bytes per write.
_ROOM, _PIECE = 4 << 20, 1 << 16
#: Seconds without progress after which the exiting process stops waiting for the reader.
_PATIENCE = 1.0


class Outlet:
    """A queue of bytes for a file descriptor. `put` never blocks; `dropped` counts lines.

    capacity: maximum bytes in the queue. Once there is room again, a line reports dropped lines.
    """

    def __init__(self, descriptor: int, capacity: int = _ROOM) -> None:
        self._descriptor = descriptor
        self._capacity = capacity
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._moved = 0
        self._unreported = 0
        self.dropped = 0
        # A signal handler may print while its own thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._busy = False
        name = f"modulm-output-{descriptor}"
        threading.Thread(target=self._run, name=name, daemon=True).start()
        atexit.register(self.flush)

    def put(self, data: bytes) -> None:
        """Queue data, or drop it if the queue is full."""
        with self._changed:
            if self._size + len(data) > self._capacity:
                self._drop(data)
                return
            self._waiting.append(data)
            self._size += len(data)
            self._changed.notify()

    def flush(self, patience: float = _PATIENCE) -> bool:
        """Wait until the queue is written; False if nothing was read for `patience` seconds."""
        seen, since = self._moved, time.monotonic()
        while self._waiting or self._busy:
            if self._moved != seen:
                seen, since = self._moved, time.monotonic()
            if time.monotonic() - since > patience:
                return False
            time.sleep(0.002)
        return True

    def _drop(self, data: bytes) -> None:
        lines = data.count(b"\n") or 1
        self.dropped += lines
        self._unreported += lines

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                self._busy = True  # set before the queue is empty: `flush` checks both
                data = self._take()
            self._write(data)
            self._busy = False

    def _take(self) -> bytes:
        pieces = [self._waiting.popleft()]
        size = len(pieces[0])
        while self._waiting and size + len(self._waiting[0]) <= _PIECE:
            size += len(self._waiting[0])
            pieces.append(self._waiting.popleft())
        self._size -= size
        if self._unreported and self._size < self._capacity // 2:
            note = (
                f"WARNING modulm: {self._unreported} lines of output were dropped: nobody read them"
            )
            pieces.append(f"{note}\n".encode())
            self._unreported = 0
        return b"".join(pieces)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                written = os.write(self._descriptor, view[:_PIECE])
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:  # the reader is gone
                self._drop(bytes(view))
                return
            else:
                self._moved += written
                view = view[written:]


class _Raw(io.RawIOBase):
    """The file below `sys.stdout` or `sys.stderr`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._outlet = outlet(descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        copy = bytes(data)
        self._outlet.put(copy)
        return len(copy)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


@cache
def outlet(descriptor: int) -> Outlet:
    """The outlet of standard output (1) or error (2); the same one if both are one file."""
    with suppress(OSError):
        if descriptor == 1 and os.path.sameopenfile(1, 2):
            return outlet(2)
    return Outlet(descriptor)


def dropped_lines() -> int:
    """The number of dropped lines of this process and of the children that it forwards."""
    return sum(one.dropped for one in {outlet(1), outlet(2)})


def unblock() -> None:
    """Make this process's standard output and error non-blocking."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = getattr(sys, name)
        if not _writes_directly(file, descriptor):
            continue
        file.flush()
        raw: IO[bytes] = _Raw(descriptor)  # type: ignore[assignment]
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, name, stream)
        with suppress(OSError):
            _unblock_pipe(descriptor)


def _writes_directly(file: IO[str] | None, descriptor: int) -> bool:
    """Whether a Python file still writes to the descriptor directly."""
    if file is None or isinstance(getattr(file, "buffer", None), _Raw):
        return False
    with suppress(OSError, AttributeError):
        return file.fileno() == descriptor
    return False


def _unblock_pipe(descriptor: int) -> None:
    """Make writes of C libraries to a full pipe fail instead of block.

    Reopens the pipe, because the non-blocking flag would apply to all processes that share it.
    """
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
        os.dup2(again, descriptor)
        os.close(again)


def forward(source: IO[bytes]) -> threading.Thread:
    """Forward a child process's output until it ends, without ever blocking the child."""

    def copy() -> None:
        with suppress(OSError, ValueError), source:
            while data := os.read(source.fileno(), _PIECE):
                outlet(2).put(data)

    thread = threading.Thread(target=copy, name="modulm-forward", daemon=True)
    thread.start()
    return thread
