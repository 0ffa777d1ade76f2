"""Collectives among ranks on one machine, through shared memory.

They are kernel calls like all others, so steps that use them can be recorded and replayed. The
memory has no name: rank 0 creates it, the others open it through rank 0's process, and it is freed
with the last process, however that ends.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import field, frozen
from torch import Tensor

from modulm.errors import EngineError
from modulm_distributed.collectives import Collectives
from modulm_distributed.torch_group import Gloo, TorchGroup
from modulm_kernels_cpu import library
from modulm_kernels_cpu.check import dtype_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from modulm.contracts.platform import Platform
    from modulm.parallel import ProcessGroup
    from modulm_distributed.collectives import Members

__all__ = ["SharedMemoryCollectives", "SharedMemoryGroup"]

_LINE = 64
#: Bytes of a slot: the maximum that ranks exchange at once.
_ROOM = 1 << 20


@frozen(eq=False)
class SharedMemoryGroup(TorchGroup):
    """Reduces and gathers through shared memory; other collectives use sockets.

    memory: [bytes] uint8, the region. calls: the C functions of the level in use.
    """

    memory: np.ndarray = field(factory=lambda: np.zeros(0, np.uint8))
    calls: tuple[Callable[..., Any], ...] = ()

    def all_reduce(self, x: Tensor) -> Tensor:
        if not (x.is_contiguous() and x.is_floating_point()):
            return super().all_reduce(x)
        out = x.new_empty(x.shape)
        self.calls[0](*self._place, x.data_ptr(), out.data_ptr(), x.numel(), dtype_code("x", x))
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], x.shape[-1] * self.size)
        if not x.numel():
            return out
        bytes_ = x.shape[-1] * x.itemsize
        rows = x.numel() * x.itemsize // bytes_
        self.calls[1](*self._place, x.data_ptr(), out.data_ptr(), rows, bytes_)
        return out

    @property
    def _place(self) -> tuple[int, int, int, int]:
        return self.memory.ctypes.data, self.rank, self.size, _ROOM


class SharedMemoryCollectives(Collectives):
    """For ranks on the CPUs of one machine."""

    name: ClassVar[str] = "cpu"
    api: ClassVar[int | tuple[int, int]] = 1

    @classmethod
    def rejects(cls, platform: Platform, members: Members) -> str | None:
        if platform.device.type != "cpu":
            return "its ranks must run on CPUs"
        return None if members.one_host else "its ranks must be on one machine"

    @classmethod
    def open(cls, platform: Platform, members: Members) -> ProcessGroup:
        sockets = Gloo.open(platform, members)
        level = library.load()
        calls = (level.call("rank_sum", "pnnnppni"), level.call("rank_gather", "pnnnppnn"))
        return SharedMemoryGroup(
            members.rank, members.size, sockets.backend, sockets.device, _memory(members), calls
        )


def _memory(members: Members) -> np.ndarray:
    """Map the region in all ranks; returns when every rank has it."""
    size = members.size * (_LINE + 2 * _ROOM)
    key, store = f"{members.name} memory", members.store
    if members.rank == 0:
        descriptor = os.memfd_create("modulm-ranks")
        os.ftruncate(descriptor, size)
        store.set(key, f"/proc/{os.getpid()}/fd/{descriptor}")
    else:
        path = store.get(key).decode()
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise EngineError(
                f"rank {members.rank} cannot map the memory of rank 0: {error}"
            ) from error
    try:
        mapped = mmap.mmap(descriptor, size)
        store.set(f"{key} {members.rank}", "mapped")
        store.wait([f"{key} {rank}" for rank in range(members.size)])
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, dtype=np.uint8)
