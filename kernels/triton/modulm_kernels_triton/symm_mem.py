"""Collectives among GPUs of one machine that sum through symmetric memory.

Not run on hardware. Sums that the kernels do not take, and everything else, go through NCCL (RCCL
on AMD). Ranks agree on that: if one of them finds a reason against symmetric memory, all log it and
sum through NCCL.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import asdict, field, frozen
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from modulm_distributed.collectives import Collectives
from modulm_distributed.torch_group import Nccl, TorchGroup, sum_in_order
from modulm_kernels_triton import device
from modulm_kernels_triton.kept import keep_compiled
from modulm_kernels_triton.launch import compiling_only

if TYPE_CHECKING:
    from modulm.contracts.platform import Platform
    from modulm.parallel import ProcessGroup
    from modulm_distributed.collectives import Members
    from modulm_kernels_triton.symmetric_sum import SumConstants, SumMemory

__all__ = ["MOST_RANKS", "SymmMemCollectives", "SymmMemGroup", "connect"]

log = logging.getLogger("modulm")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Most ranks that read each other's memory.
MOST_RANKS = 8
#: AMD's chips whose instructions for memory between GPUs the kernels use.
_AMD = ("gfx942", "gfx950")
#: How often a program looks at signals in the check, which takes seconds.
_LOOKS = 1 << 24
#: Numbers of the sums that are checked.
_CHECKED = (4099, 1 << 19)


@frozen(eq=False)
class SymmMemGroup(TorchGroup):
    """Sums through symmetric memory; other collectives, and other tensors, use the backend.

    memory: what the kernels sum with. owned: keeps the buffers of all ranks mapped.
    """

    memory: Any = None
    owned: Any = field(default=None, repr=False)

    def all_reduce(self, x: Tensor) -> Tensor:
        from modulm_kernels_triton.symmetric_sum import sum_over_ranks

        memory: SumMemory = self.memory
        if x.dtype not in _DTYPES or x.numel() * x.itemsize > memory.constants.most:
            return super().all_reduce(x)
        return sum_over_ranks(x.contiguous(), memory)


class SymmMemCollectives(Collectives):
    """For ranks on GPUs of one machine that reach each other's memory."""

    name: ClassVar[str] = "symm_mem"
    api: ClassVar[int | tuple[int, int]] = 1
    custom_all_reduce: ClassVar[bool] = True

    @classmethod
    def rejects(cls, platform: Platform, members: Members) -> str | None:
        if platform.device.type != "cuda":
            return "its ranks must run on GPUs of NVIDIA or AMD"
        if not members.one_host:
            return "its ranks must be on one machine"
        if members.size > MOST_RANKS:
            return f"it connects at most {MOST_RANKS} ranks, not {members.size}"
        if not hasattr(c10d, "_SymmetricMemory"):
            return "this torch was built without symmetric memory"
        reason = device.unusable(platform.device)
        if reason is not None:
            return reason
        backend, chip = device.target()
        if backend == "hip" and chip not in _AMD:
            return f"of AMD's chips it takes {' and '.join(_AMD)}, not {chip}"
        return Nccl.rejects(platform, members)

    @classmethod
    def open(cls, platform: Platform, members: Members) -> ProcessGroup:
        return connect(Nccl.open(platform, members), platform, members, _map_buffers)


def connect(
    group: TorchGroup,
    platform: Platform,
    members: Members,
    map_buffers: Callable[[Platform, Members, int], tuple[list[int], Any]],
) -> TorchGroup:
    """Return the group with sums through symmetric memory, or the group itself with the reason
    logged.

    map_buffers: allocates the given number of zeroed bytes on each rank; returns the address of
    each rank's buffer as this process sees it, and what keeps them. It raises RuntimeError.
    """
    from modulm_kernels_triton.symmetric_sum import SumConstants, SumMemory, buffer_bytes

    keep_compiled()
    agree = _Agreement(members)
    # The first rank's constants, since tables of kernels may differ between ranks.
    constants = SumConstants(**agree.of_first(lambda: asdict(SumConstants.tuned(members.size))))
    places = agree.exchange(_place(platform))
    reason = agree.on(_unreachable(platform, places))
    owned, memory = None, None
    if reason is None:
        failure = None
        try:
            addresses, owned = map_buffers(platform, members, buffer_bytes(constants))
            memory = SumMemory.of(
                members.rank, constants, torch.tensor(addresses, device=platform.device)
            )
        except RuntimeError as error:
            failure = f"torch cannot share their memory: {str(error).splitlines()[0]}"
        reason = agree.on(failure)
    if reason is None:
        reason = agree.on(_compile(platform, memory))
    if reason is None:
        reason = agree.on(_wrong(platform, memory))
    if reason is not None:
        if members.rank == 0:
            log.warning("ranks of %s do not sum with symm_mem but nccl: %s", members.name, reason)
        return group
    if members.rank == 0:
        log.info("ranks of %s sum through symmetric memory: %s", members.name, _limits(constants))
    parts = {"rank": group.rank, "size": group.size, "backend": group.backend}
    return SymmMemGroup(**parts, device=group.device, memory=memory, owned=owned)


class _Agreement:
    """Values that all ranks exchange through their store, in the same order."""

    def __init__(self, members: Members) -> None:
        self._members, self._count = members, 0
        self._store = c10d.PrefixStore(f"{members.name} symm_mem", members.store)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, JSON."""
        self._count += 1
        self._store.set(f"{self._count} {self._members.rank}", json.dumps(value))
        keys = [f"{self._count} {rank}" for rank in range(self._members.size)]
        return [json.loads(self._store.get(key)) for key in keys]

    def of_first(self, value: Callable[[], Any]) -> Any:
        """Return the first rank's value."""
        return self.exchange(value() if self._members.rank == 0 else None)[0]

    def on(self, reason: str | None) -> str | None:
        """Return the first reason that a rank has, None if none has one."""
        reasons = self.exchange(reason)
        return next((each for each in reasons if each is not None), None)


def _place(platform: Platform) -> int:
    return platform.device.index or 0


def _unreachable(platform: Platform, places: list[int]) -> str | None:
    """Return why this rank's GPU does not reach the others, None if it does."""
    own = _place(platform)
    if len(set(places)) < len(places):
        return "several ranks share a GPU"
    for other in places:
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} cannot access the memory of GPU {other}"
    return None


def _map_buffers(platform: Platform, members: Members, size: int) -> tuple[list[int], Any]:
    """Allocate symmetric memory with torch. Its groups are named in a registry of the process."""
    name = f"modulm {members.name}"
    store = c10d.PrefixStore(f"{members.name} symmetric", members.store)
    ranks = c10d.ProcessGroup(store, members.rank, members.size)
    ranks._set_group_name(name)
    c10d._register_process_group(name, ranks)
    memory = c10d._SymmetricMemory
    memory.set_group_info(name, members.rank, members.size, store)
    buffer = memory.empty_strided_p2p((size,), (1,), torch.uint8, platform.device, name)
    buffer.zero_()
    platform.synchronize()
    handle = memory.rendezvous(buffer)
    addresses = list(handle.buffer_ptrs)
    if addresses[members.rank] != buffer.data_ptr():
        raise RuntimeError("this rank's buffer has another address than its peers were told")
    return addresses, (ranks, buffer, handle)


def _inputs(platform: Platform, ranks: int, size: int) -> list[Tensor]:
    dtype = getattr(torch, platform.dtypes[0])
    steps = torch.arange(size, dtype=torch.float32)
    made = [torch.sin(steps * (rank + 1) + rank) * 8 for rank in range(ranks)]
    return [x.to(dtype).to(platform.device) for x in made]


def _compile(platform: Platform, memory: SumMemory) -> str | None:
    """Compile the kernels, so that ranks do not wait for it in the check."""
    from modulm_kernels_triton.symmetric_sum import sum_over_ranks

    if device.interpreting():
        return None
    try:
        with compiling_only():
            for two_shot in (False, True):
                for size in _CHECKED:
                    x = _inputs(platform, 1, size)[0]
                    sum_over_ranks(x, memory, two_shot=two_shot)
    except Exception as error:  # of the compiler: no common base class
        return f"their kernels do not compile: {(str(error).splitlines() or [repr(error)])[0]}"
    return None


def _wrong(platform: Platform, memory: SumMemory) -> str | None:
    """Sum known tensors, twice in a row; return what is wrong, None if the bits are right."""
    from modulm_kernels_triton.symmetric_sum import sum_over_ranks

    ranks, limit = memory.addresses.shape[0], _LOOKS
    wrong = False
    for two_shot in (False, True):
        for size in _CHECKED:
            inputs = _inputs(platform, ranks, size)
            own = inputs[memory.rank]
            sums = [sum_over_ranks(own, memory, two_shot=two_shot, limit=limit) for _ in range(2)]
            if memory.failed.item():
                return "their kernels do not see each other's signals"
            wanted = sum_in_order(inputs)
            wrong = wrong or not all(torch.equal(total, wanted) for total in sums)
    return "a sum of known numbers was wrong" if wrong else None


def _limits(constants: SumConstants) -> str:
    kib = constants.one_shot >> 10, constants.most >> 10
    return f"one-shot up to {kib[0]} KiB, two-shot up to {kib[1]} KiB, nccl beyond"
