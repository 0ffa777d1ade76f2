"""Synchronize replicas that share experts: all run the same number of passes through the model.

The number of passes each replica has started is in shared memory. A replica with work starts a pass
and wakes those that are behind, which start one too, with an empty batch if they are idle. If no
replica has work, all sleep. The memory and the wake-up pipes are files in a private folder.
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
#: Bytes read from a pipe at once.
_BELLS = 4096


class Rounds:
    """The passes of replica number `replica` of `replicas`, and of the others.

    The lock `order` is held from the start of a pass until its plan has been sent to the workers.
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
        self._passes = np.frombuffer(mapped, dtype=np.int64)[:: _LINE // 8]
        self._bells: list[int] = []
        try:
            for index in range(replicas):
                self._bells.append(_pipe(Path(folder) / f"bell-{index}"))
        except BaseException:
            self.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._bells[replica], select.POLLIN)
        self._closed = False

    @property
    def behind(self) -> bool:
        """Whether another replica has started more passes than this one."""
        return not self._closed and bool(self._passes.max() > self._passes[self._replica])

    def begin(self) -> None:
        """Start a pass. The caller holds `order`."""
        self._passes[self._replica] += 1
        for replica in np.flatnonzero(self._passes < self._passes[self._replica]).tolist():
            self._wake(replica)

    def wait(self) -> bool:
        """Sleep until another replica may have started a pass; False after `end`."""
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
        """Close the pipes, when no thread waits."""
        bells, self._bells = self._bells, []
        for bell in bells:
            os.close(bell)

    def _wake(self, replica: int) -> None:
        with suppress(BlockingIOError):  # a full pipe wakes its reader anyway
            os.write(self._bells[replica], b"!")


def _pipe(path: Path) -> int:
    """A named pipe, opened for reading and writing so that opening never blocks."""
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)
