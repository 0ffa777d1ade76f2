"""Sort a step's expert choices into blocks of rows per expert, without host synchronization."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from modulm_kernels_triton.launch import cut, launch, power_of_two

__all__ = ["ByExpert", "rows_of_blocks", "sort_by_expert"]

_AT_ONCE = 1024


@frozen(eq=False)
class ByExpert:
    """Choices sorted by expert.

    order: [choices] int32, token * top_k + choice, in stable order. blocks: [most, 3] int32: expert
    (-1: none), first index in `order`, count (at most `rows`).
    """

    order: Tensor
    blocks: Tensor
    rows: int


@triton.jit(do_not_specialize=["choices"])
def _count(ids, counts, choices, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, choices, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += (tl.load(ids + at, at < choices, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["choices", "most"])
def _place(
    ids, counts, order, blocks, choices, experts, rows, most,
    BE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program `experts` fills the unused blocks."""
    expert = tl.program_id(0)
    number = tl.arange(0, BE)
    each = tl.load(counts + number, number < experts, other=0)
    before = number < expert
    first = tl.sum(tl.where(before, each, 0), 0)
    block = tl.sum(tl.where(before, (each + rows - 1) // rows, 0), 0)
    count = tl.sum(tl.where(number == expert, each, 0), 0)
    if expert < experts:
        done = first
        for start in range(0, choices, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mine = (tl.load(ids + at, at < choices, other=-1) == expert).to(tl.int32)
            rank = tl.cumsum(mine, 0) - mine
            tl.store(order + done + rank, at, mine != 0)
            done += tl.sum(mine, 0)
        for start in range(0, count, rows):
            to = blocks + (block + start // rows) * 3
            tl.store(to, expert)
            tl.store(to + 1, first + start)
            tl.store(to + 2, tl.minimum(count - start, rows))
    else:
        for left in range(block, most):
            tl.store(blocks + left * 3, -1)


def sort_by_expert(ids: Tensor, experts: int, rows: int) -> ByExpert:
    """Sort ids [T, top_k] int64, dense; choices outside [0, experts) are dropped."""
    choices = ids.numel()
    most = min(choices, experts + choices // rows)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(choices, dtype=torch.int32, device=ids.device)
    blocks = torch.empty(most, 3, dtype=torch.int32, device=ids.device)
    block = min(_AT_ONCE, power_of_two(choices))
    launch(_count, (experts,), ids, counts, choices, BLOCK=block)
    launch(
        _place, (experts + 1,), ids, counts, order, blocks, choices, experts, rows, most,
        BE=power_of_two(experts), BLOCK=block,
    )  # fmt: skip
    return ByExpert(order, blocks, rows)


def rows_of_blocks(choices: int, experts: int) -> int:
    """Return the number of rows per block: few if experts get few rows."""
    each = cut(choices, experts)
    return 16 if each <= 16 else 64 if each <= 128 else 128
