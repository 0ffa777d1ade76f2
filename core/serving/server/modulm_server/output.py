"""What a process prints, on its way to a reader who may not read.

A pipe holds 64 KiB: who writes to a full one stands still, mostly with the lock of a log handler in
its hand, and soon the whole process does. So a thread writes to standard output and standard error,
everybody else only puts into its queue, and what finds the queue full is dropped and counted.
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

#: Bytes that wait for a reader at most, and that are written at once.
_ROOM, _PIECE = 4 << 20, 1 << 16
#: Seconds without progress after which the end of the process does not wait for the reader.
_PATIENCE = 1.0


class Outlet:
    """Bytes on their way to a file descriptor. `put` never waits; `dropped` counts lines.

    room: bytes that may wait. That lines were dropped is said in a line, once there is room again.
    """

    def __init__(self, descriptor: int, room: int = _ROOM) -> None:
        self._descriptor = descriptor
        self._room = room
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._moved = 0
        self._untold = 0
        self.dropped = 0
        # A signal handler may print while its own thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._busy = False
        name = f"modulm-output-{descriptor}"
        threading.Thread(target=self._run, name=name, daemon=True).start()
        atexit.register(self.flush)

    def put(self, data: bytes) -> None:
        """Have data written, or drop it."""
        with self._changed:
            if self._size + len(data) > self._room:
                self._drop(data)
                return
            self._waiting.append(data)
            self._size += len(data)
            self._changed.notify()

    def flush(self, patience: float = _PATIENCE) -> bool:
        """Wait until all is written; False when nothing was read for `patience` seconds."""
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
        self._untold += lines

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                self._busy = True  # before nothing waits any more: `flush` looks at both
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
        if self._untold and self._size < self._room // 2:
            note = f"WARNING modulm: {self._untold} lines of output were dropped: nobody read them"
            pieces.append(f"{note}\n".encode())
            self._untold = 0
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
            except OSError:  # nobody will ever read it
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
    """This process' outlet to standard output (1) or error (2); one if both are the same file."""
    with suppress(OSError):
        if descriptor == 1 and os.path.sameopenfile(1, 2):
            return outlet(2)
    return Outlet(descriptor)


def dropped_lines() -> int:
    """Lines that this process and those it forwards have printed for nobody."""
    return sum(one.dropped for one in {outlet(1), outlet(2)})


def unblock() -> None:
    """Let nothing that this process prints wait for its reader: Python's files, and pipes."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = getattr(sys, name)
        if not _is_own(file, descriptor):
            continue
        file.flush()
        raw: IO[bytes] = _Raw(descriptor)  # type: ignore[assignment]
        made = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, name, made)
        with suppress(OSError):
            _let_go(descriptor)


def _is_own(file: IO[str] | None, descriptor: int) -> bool:
    """Whether a file of Python's still writes to the descriptor by itself."""
    if file is None or isinstance(getattr(file, "buffer", None), _Raw):
        return False
    with suppress(OSError, AttributeError):
        return file.fileno() == descriptor
    return False


def _let_go(descriptor: int) -> None:
    """Have libraries that print by themselves lose what a full pipe has no room for.

    The pipe is opened anew: the flag on what we were given would be everybody's who has it.
    """
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
        os.dup2(again, descriptor)
        os.close(again)


def forward(source: IO[bytes]) -> threading.Thread:
    """Print what a child process prints, until it ends; the child never waits."""

    def copy() -> None:
        with suppress(OSError, ValueError), source:
            while data := os.read(source.fileno(), _PIECE):
                outlet(2).put(data)

    thread = threading.Thread(target=copy, name="modulm-forward", daemon=True)
    thread.start()
    return thread
