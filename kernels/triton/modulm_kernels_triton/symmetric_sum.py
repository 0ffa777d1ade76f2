"""Sums over ranks through memory that every rank can read (symmetric memory).

One-shot: each rank reads the tensors of all ranks. Two-shot: each rank sums a part and reads the
other parts' sums from their ranks, which moves less data but waits twice. Both add in the order of
ranks, in fp32, and round once: the same bits as `modulm_distributed.torch_group.sum_in_order`, on
every rank.

A program works only with the programs of the same number on other ranks, through a slot of its own.
It counts its meetings with them (`epochs`). A signal is the number of the meeting that a rank has
reached, so signals are never reset. Slots for inputs alternate with that number. The counts are on
the device, so recorded steps can be replayed in any order, as long as it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from modulm_kernels_triton.device import target
from modulm_kernels_triton.launch import cut, launch, power_of_two

__all__ = ["SumConstants", "SumMemory", "buffer_bytes", "sum_over_ranks"]

#: int32 signals of a program: one for each rank, on a cache line of their own.
_LINE = 32
_LINE_LENGTH = tl.constexpr(_LINE)


#: What LLVM's memory model for gfx942 asks of a release and an acquire between GPUs. Triton's
#: barrier does not wait for stores there, and LLVM's wait after a write-back is left out.
_RELEASE = tl.constexpr("s_waitcnt vmcnt(0)\nbuffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\n")
_ACQUIRE = tl.constexpr("buffer_inv sc0 sc1\ns_waitcnt vmcnt(0)\n")
_COPY = tl.constexpr("v_mov_b32 $0, $1")


@triton.jit
def _all_threads(lanes, WAIT: tl.constexpr, AMD: tl.constexpr):
    """Wait for all threads of this program, and on AMD's GPUs for their memory operations."""
    if AMD:
        tl.inline_asm_elementwise(WAIT + _COPY, "=v,v", [lanes], tl.int32, False, 1)
    tl.debug_barrier()


@triton.jit
def _meet(
    addresses, rank, program, epoch, limit, failed,
    RANKS: tl.constexpr, WIDE: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """Wait until the programs of all ranks have come here; returns the meetings so far.

    Everything that they wrote before can be read afterwards. limit: how often to look at the
    signals before `failed` is set; 0: forever.
    """
    ranks = tl.arange(0, WIDE)
    inside = ranks < RANKS
    arrived = epoch + 1
    _all_threads(ranks, _RELEASE, AMD)
    of_rank = tl.load(addresses + ranks, inside, other=0).to(tl.pointer_type(tl.int32))
    there = of_rank + program * _LINE_LENGTH + rank
    tl.atomic_xchg(there, tl.zeros([WIDE], tl.int32) + arrived, inside, sem="release", scope="sys")
    own = tl.load(addresses + rank).to(tl.pointer_type(tl.int32))
    here = own + program * _LINE_LENGTH + ranks
    looks = 0
    waiting = 1
    while waiting > 0:
        seen = tl.atomic_add(here, 0, inside, sem="acquire", scope="sys")
        behind = tl.where(inside, arrived - seen, 0)
        waiting = tl.max(behind, 0)
        looks += 1
        if (looks == limit) & (waiting > 0):
            tl.store(failed, 1)
            waiting = 0
    _all_threads(ranks, _ACQUIRE, AMD)
    return arrived


@triton.jit
def _sum_at(addresses, where, inside, RANKS: tl.constexpr, KIND: tl.constexpr):
    """Add the numbers of dtype KIND at the elements `where` of all ranks' buffers."""
    base = tl.load(addresses).to(tl.pointer_type(KIND))
    total = tl.load(tl.multiple_of(base, 16) + where, inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        base = tl.load(addresses + rank).to(tl.pointer_type(KIND))
        total += tl.load(tl.multiple_of(base, 16) + where, inside, other=0.0).to(tl.float32)
    return total.to(KIND)


#: Ranks share one compiled kernel: loading another while a kernel waits may wait for that kernel.
_SAME = ["rank", "limit"]


@triton.jit(do_not_specialize=_SAME)
def _one_shot(
    x, out, addresses, epochs, failed, rank, size, per, rounds, first, room, limit,
    RANKS: tl.constexpr, WIDE: tl.constexpr, AMD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program sums `per` numbers in each of `rounds`.

    first, room: where slots begin and the size of an area, in numbers. A slot has three areas:
    inputs of even and of odd meetings, results.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + program)
    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(x.dtype.element_ty)), 16)
    lane = tl.arange(0, BLOCK)
    for number in range(rounds):
        start = (number * programs + program).to(tl.int64) * per
        area = first + (program * 3 + (epoch & 1)) * room
        for at in range(0, per, BLOCK):
            inside = start + at + lane < size
            tl.store(own + area + at + lane, tl.load(x + start + at + lane, inside), inside)
        epoch = _meet(addresses, rank, program, epoch, limit, failed, RANKS, WIDE, AMD)
        for at in range(0, per, BLOCK):
            inside = start + at + lane < size
            total = _sum_at(addresses, area + at + lane, inside, RANKS, x.dtype.element_ty)
            tl.store(out + start + at + lane, total, inside)
    tl.store(epochs + program, epoch)


@triton.jit(do_not_specialize=_SAME)
def _two_shot(
    x, out, addresses, epochs, failed, rank, size, per, rounds, first, room, limit,
    RANKS: tl.constexpr, WIDE: tl.constexpr, AMD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `_one_shot`; `per` is the part that a rank sums of a program's numbers in a round."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + program)
    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(x.dtype.element_ty)), 16)
    lane = tl.arange(0, BLOCK)
    for number in range(rounds):
        start = (number * programs + program).to(tl.int64) * per * RANKS
        area = first + (program * 3 + (epoch & 1)) * room
        sums = first + (program * 3 + 2) * room
        for at in range(0, per * RANKS, BLOCK):
            inside = start + at + lane < size
            tl.store(own + area + at + lane, tl.load(x + start + at + lane, inside), inside)
        epoch = _meet(addresses, rank, program, epoch, limit, failed, RANKS, WIDE, AMD)
        part = rank * per
        for at in range(0, per, BLOCK):
            inside = start + part + at + lane < size
            total = _sum_at(addresses, area + part + at + lane, inside, RANKS, x.dtype.element_ty)
            tl.store(own + sums + at + lane, total, inside)
        epoch = _meet(addresses, rank, program, epoch, limit, failed, RANKS, WIDE, AMD)
        for other in tl.static_range(RANKS):
            base = tl.load(addresses + other).to(tl.pointer_type(x.dtype.element_ty))
            base = tl.multiple_of(base, 16)
            for at in range(0, per, BLOCK):
                inside = start + other * per + at + lane < size
                total = tl.load(base + sums + at + lane, inside)
                tl.store(out + start + other * per + at + lane, total, inside)
    tl.store(epochs + program, epoch)


@frozen
class SumConstants:
    """Sizes on which all ranks agree.

    block: numbers that a program handles at once. programs: their maximum. room: bytes of an area.
    one_shot: bytes up to which tensors are summed in one shot; most: up to which this way at all.
    """

    block: int
    programs: int
    room: int
    one_shot: int
    most: int
    num_warps: int

    @classmethod
    def tuned(cls, ranks: int) -> SumConstants:
        """Return those of this device's table."""
        from modulm_kernels_triton.tuning import tuned

        entry: Mapping[str, int] = tuned("all_reduce", RANKS=ranks)
        names = ("BLOCK", "PROGRAMS", "ROOM", "ONE_SHOT", "MOST", "num_warps")
        return cls(*(entry[name] for name in names))


@frozen(eq=False)
class SumMemory:
    """The memory that a rank sums with.

    addresses: [ranks] int64, where each rank's buffer of `buffer_bytes` begins. epochs: [programs]
    int32. failed: [1] int32, set if a limited wait ended. Buffers and epochs begin as zeros.
    """

    rank: int
    constants: SumConstants
    addresses: Tensor
    epochs: Tensor
    failed: Tensor

    @classmethod
    def of(cls, rank: int, constants: SumConstants, addresses: Tensor) -> SumMemory:
        """Create it, with its counts at zero."""
        counts = torch.zeros(constants.programs + 1, dtype=torch.int32, device=addresses.device)
        return cls(rank, constants, addresses, counts[1:], counts[:1])


def buffer_bytes(constants: SumConstants) -> int:
    """Return the size of a rank's buffer: signals, then three areas for each program."""
    return constants.programs * (4 * _LINE + 3 * constants.room)


def sum_over_ranks(
    x: Tensor, memory: SumMemory, *, two_shot: bool | None = None, limit: int = 0
) -> Tensor:
    """Return the sum of all ranks' tensors of this shape; every rank makes the same call.

    x: contiguous, bf16, fp16 or fp32. two_shot: None: by size. limit: how often a program looks at
    the signals of others before it gives up and sets `memory.failed`; 0: it waits forever.
    """
    constants, ranks = memory.constants, memory.addresses.shape[0]
    out, size = torch.empty_like(x), x.numel()
    if two_shot is None:
        two_shot = size * x.itemsize > constants.one_shot
    parts = ranks if two_shot else 1
    unit = parts * constants.block
    programs = max(min(constants.programs, cut(size, unit)), 1)
    room = constants.room // x.itemsize
    units = max(min(cut(size, programs * unit), room // unit), 1)
    launch(
        _two_shot if two_shot else _one_shot, (programs if size else 0,),
        x, out, memory.addresses, memory.epochs, memory.failed, memory.rank,
        size, units * constants.block, cut(size, programs * units * unit),
        constants.programs * 4 * _LINE // x.itemsize, room, limit,
        RANKS=ranks, WIDE=power_of_two(ranks), AMD=target()[0] == "hip",
        BLOCK=constants.block, num_warps=constants.num_warps,
    )  # fmt: skip
    return out
