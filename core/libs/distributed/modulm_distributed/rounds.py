"""Replicas that share experts keep step: each begins as many passes through the model as any other.

How many each has begun is in memory that all have mapped. Who has work begins a pass and wakes
those that have begun fewer; these begin one as well, with an empty batch where they have nothing
to do. Where nobody has work nobody is awake. The memory and the pipes that wake are files in a
folder that is the replicas' own.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

__all__ = ["Rounds"]

_LINE = 64
#: Bytes that are read of a pipe at once.
_BELLS = 4096


class Rounds:
    """What replica number `replica` of `replicas` has begun, and the others.

    `order` is held from a pass's beginning until the workers have been told of it.
    """

    def __init__(self, folder: str, replica: int, replicas: int) -> None:
        self.order = threading.Lock()
        self._replica = replica
        descriptor = os.open(Path(folder) / "begun", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, replicas * _LINE)
            mapped = mmap.mmap(descriptor, replicas * _LINE)
        finally:
            os.close(descriptor)
        self._begun = np.frombuffer(mapped, dtype=np.int64)[:: _LINE // 8]
        self._bells = [_pipe(Path(folder) / f"bell-{place}") for place in range(replicas)]
        self._poll = select.poll()
        self._poll.register(self._bells[replica], select.POLLIN)
        self._closed = False

    @property
    def behind(self) -> bool:
        """Whether another replica has begun a pass that this one has not."""
        return not self._closed and bool(self._begun.max() > self._begun[self._replica])

    def begin(self) -> None:
        """A pass begins; `order` is held."""
        self._begun[self._replica] += 1
        for place in np.flatnonzero(self._begun < self._begun[self._replica]).tolist():
            self._wake(place)

    def wait(self) -> bool:
        """Sleep until another replica may have begun a pass; False: it is over."""
        self._poll.poll()
        if self._closed:
            return False
        with suppress(BlockingIOError):
            os.read(self._bells[self._replica], _BELLS)
        return True

    def end(self) -> None:
        """Let `wait` return."""
        self._closed = True
        self._wake(self._replica)

    def close(self) -> None:
        """Nobody waits any more, and none will begin."""
        bells, self._bells = self._bells, []
        for bell in bells:
            os.close(bell)

    def _wake(self, place: int) -> None:
        with suppress(BlockingIOError):  # it has not even read what there is
            os.write(self._bells[place], b"!")


def _pipe(path: Path) -> int:
    """One that somebody has open for reading and writing, so that nobody waits for the other."""
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)
