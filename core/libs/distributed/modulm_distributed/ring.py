"""Frames from one process to others of the same machine, through memory that all have mapped.

The memory: a line of 64 bytes for each reader with how many frames it has read, then slots, used in
turn, each with its length in front. Who has written rings a bell (an eventfd) of each reader: how
many times it was rung is how many frames there are. Nothing of it has a name: it is gone with the
last process that has it open.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["SPIN", "Ring", "wait"]

_LINE = 64
_SLOTS = 16
#: Bytes of a slot: its length and what is in it.
_ROOM = 1 << 18
#: Rings that only wake a reader are counted above those for frames.
_WAKE = 1 << 32
#: Seconds between two looks at readers that are far behind.
_PAUSE = 5e-5
#: Seconds that who waits looks before it sleeps: to be woken takes about as long.
SPIN = 1e-4


def wait(poll: select.poll, seconds: float) -> list[tuple[int, int]]:
    """What is ready, at least one thing: looked for over and over for some seconds, then slept."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if found := poll.poll(0):
            return found
        os.sched_yield()
    return poll.poll()


class Ring:
    """One writes, `readers` others read each frame. Which of them this process is, it says itself.

    memory: a descriptor of the memory; bells: one descriptor for each reader.
    """

    def __init__(self, memory: int, bells: Sequence[int]) -> None:
        self.descriptors = (memory, *bells)
        self._bells, readers = tuple(bells), len(bells)
        mapped = mmap.mmap(memory, readers * _LINE + _SLOTS * _ROOM)
        whole = np.frombuffer(mapped, dtype=np.uint8)
        self._read = whole[: readers * _LINE].view(np.int64)[:: _LINE // 8]
        self._slots = [
            memoryview(mapped)[readers * _LINE + slot * _ROOM :][:_ROOM] for slot in range(_SLOTS)
        ]
        self._count = 0

    @classmethod
    def made(cls, readers: int) -> Ring:
        """A new one, whose descriptors other processes are given."""
        memory = os.memfd_create("modulm-ring")
        os.ftruncate(memory, readers * _LINE + _SLOTS * _ROOM)
        return cls(memory, [os.eventfd(0) for _ in range(readers)])

    def write(self, data: bytes, alive: Callable[[], bool] = lambda: True) -> bool:
        """Give a frame to all readers; False: it is too long, they are given an empty one. Waits
        for readers that are behind as long as they are `alive`.
        """
        slot = self._slots[self._count % _SLOTS]
        while self._count - int(self._read.min()) >= _SLOTS and alive():
            time.sleep(_PAUSE)
        fits = len(data) <= _ROOM - 4
        size = len(data) if fits else 0
        slot[:4] = size.to_bytes(4, sys.byteorder)
        slot[4 : 4 + size] = data[:size]
        self._count += 1
        for bell in self._bells:
            os.eventfd_write(bell, 1)
        return fits

    def wake(self, reader: int = 0) -> None:
        """Let `frames` of a reader return without any."""
        os.eventfd_write(self._bells[reader], _WAKE)

    def frames(self, reader: int = 0) -> Iterator[memoryview]:
        """The frames that have come, at least one unless it is woken; each is there until the next
        is asked for.
        """
        rung = int.from_bytes(os.read(self._bells[reader], 8), sys.byteorder)
        for _ in range(rung % _WAKE):
            slot = self._slots[self._count % _SLOTS]
            size = int.from_bytes(slot[:4], sys.byteorder)
            yield slot[4 : 4 + size]
            self._count += 1
            self._read[reader] = self._count

    def bell(self, reader: int = 0) -> int:
        """What selectors look at for a reader."""
        return self._bells[reader]

    def close(self) -> None:
        """Close the descriptors; the memory is unmapped when nobody looks at it any more."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
