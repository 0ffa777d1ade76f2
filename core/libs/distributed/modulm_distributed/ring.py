"""Frames from one process to others of the same machine, through shared memory.

Memory layout: a 64-byte line for each reader, with the number of frames it has read, then slots
used in turn, each preceded by its length. The writer signals an eventfd (bell) of each reader; its
count is the number of new frames. Memory and bells have no names, so they are freed with the last
process that has them open.
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

__all__ = ["SHORT", "SPIN", "Ring", "wait"]

_LINE = 64
_SLOTS = 16
#: Bytes of a slot, with the length of its frame.
_ROOM = 1 << 18
#: Added to a bell to wake a reader without a frame.
_WAKE = 1 << 32
#: Seconds between two checks of readers that are far behind.
_PAUSE = 5e-5
#: Seconds to poll before sleeping; waking up takes about as long.
SPIN = 1e-4
#: Gaps shorter than this (seconds) between two frames are polled for throughout.
SHORT = 5e-4


def wait(poll: select.poll, seconds: float) -> list[tuple[int, int]]:
    """Return descriptors that are ready, at least one: poll for some seconds, then sleep."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if ready := poll.poll(0):
            return ready
        os.sched_yield()
    return poll.poll()


class Ring:
    """Shared memory with one writer and several readers, each of which reads every frame.

    memory: its descriptor. bells: a descriptor for each reader.
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
        #: Frames that the slowest reader had read when the writer last looked.
        self._least = 0

    @classmethod
    def create(cls, readers: int) -> Ring:
        """Create a ring, whose `descriptors` are sent to the other processes."""
        descriptors = [os.memfd_create("modulm-ring")]
        try:
            os.ftruncate(descriptors[0], readers * _LINE + _SLOTS * _ROOM)
            descriptors.extend(os.eventfd(0) for _ in range(readers))
            return cls(descriptors[0], descriptors[1:])
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def write(self, data: bytes, alive: Callable[[], bool] = lambda: True) -> bool:
        """Write a frame for all readers; if it is too long, write an empty one and return False.

        Waits for slow readers while they are `alive`.
        """
        slot = self._slots[self._count % _SLOTS]
        if self._count - self._least >= _SLOTS:
            self._wait_for_readers(alive)
        fits = len(data) <= _ROOM - 4
        size = len(data) if fits else 0
        slot[:4] = size.to_bytes(4, sys.byteorder)
        slot[4 : 4 + size] = data[:size]
        self._count += 1
        for bell in self._bells:
            os.eventfd_write(bell, 1)
        return fits

    def _wait_for_readers(self, alive: Callable[[], bool]) -> None:
        while (read := int(self._read.min())) <= self._count - _SLOTS and alive():
            time.sleep(_PAUSE)
        self._least = read

    def wake(self, reader: int = 0) -> None:
        """Make `frames` of a reader return without a frame."""
        os.eventfd_write(self._bells[reader], _WAKE)

    def frames(self, reader: int = 0) -> Iterator[memoryview]:
        """Yield new frames, at least one unless woken. Each is valid until the next is
        requested.
        """
        rung = int.from_bytes(os.read(self._bells[reader], 8), sys.byteorder)
        for _ in range(rung % _WAKE):
            slot = self._slots[self._count % _SLOTS]
            size = int.from_bytes(slot[:4], sys.byteorder)
            yield slot[4 : 4 + size]
            self._count += 1
            self._read[reader] = self._count

    def bell(self, reader: int = 0) -> int:
        """Return the descriptor that a reader polls."""
        return self._bells[reader]

    def close(self) -> None:
        """Close the descriptors; the memory is unmapped with the last view of it."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
