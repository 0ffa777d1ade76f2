"""LoRA additions of several adapters in one launch: project down to the rank, then up, and add.

Tokens are grouped in blocks of one adapter, whose matrices are found through a table of addresses.
The op `add_lora_blocks` takes everything that differs between steps of equal size from tensors that
stay in place, so that its launches may be recorded.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from modulm_adapters.lora_ops import BLOCK, LoraTable, SlotBlocks, SlotGroups
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.weights import need

__all__ = ["OPS"]

_WIDE = 64
#: Ranks per program, or per turn of one.
_RANKS = 64
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@frozen(eq=False)
class _Blocks:
    """used: the group list that the blocks were built from. order: [tokens] int32. numbers: [n, 3]
    int32: slot, first index in `order`, count.
    """

    used: list[tuple[int, int, int]]
    order: Tensor
    numbers: Tensor


_known: WeakKeyDictionary[SlotGroups, _Blocks] = WeakKeyDictionary()


@triton.jit
def _block(blocks, order, addresses, most, ROWS: tl.constexpr):
    """Return (tokens [ROWS], which are valid, address of the adapter's entry)."""
    block, piece = tl.program_id(0), tl.program_id(1)
    slot = tl.load(blocks + block * 3)
    first, count = tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    at = tl.arange(0, ROWS)
    token = tl.load(order + first + at, at < count, other=0).to(tl.int64)
    return token, at < count, addresses + (slot * most + piece) * 5


@triton.jit
def _down(
    x, x_row, order, blocks, addresses, narrow, most, ranks, inputs,
    IDS: tl.constexpr, KEPT: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    token, known, address = _block(blocks, order, addresses, most, ROWS)
    rank, least = tl.load(address), tl.program_id(2) * RANK
    if rank > least:
        down = tl.load(address + 1).to(tl.pointer_type(KEPT))
        r = least + tl.arange(0, RANK)
        inside = r < rank
        if IDS:
            entry = tl.load(x + token, known, other=0)
            total = tl.load(
                down + entry[:, None] * rank + r[None, :], known[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)  # fmt: skip
        else:
            total = tl.zeros((ROWS, RANK), tl.float32)
            for start in range(0, inputs, BK):
                k = start + tl.arange(0, BK)
                there = k < inputs
                a = tl.load(
                    x + token[:, None] * x_row + k[None, :], known[:, None] & there[None, :],
                    other=0.0,
                )  # fmt: skip
                b = tl.load(
                    down + r[:, None].to(tl.int64) * inputs + k[None, :],
                    inside[:, None] & there[None, :], other=0.0,
                )  # fmt: skip
                if WIDE:
                    a, b = a.to(tl.float32), b.to(tl.float32)
                total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        index = (token[:, None] * most + tl.program_id(1)) * ranks + r[None, :]
        tl.store(narrow + index, total, known[:, None])


@triton.jit
def _up(
    out, out_row, order, blocks, addresses, narrow, most, ranks,
    KEPT: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    token, known, address = _block(blocks, order, addresses, most, ROWS)
    rank, size = tl.load(address), tl.load(address + 4)
    if (rank > 0) & (tl.program_id(2) * BN < size):
        up = tl.load(address + 2).to(tl.pointer_type(KEPT))
        column = tl.program_id(2) * BN + tl.arange(0, BN)
        inside = column < size
        added = tl.zeros((ROWS, BN), tl.float32)
        for least in range(0, rank, RANK):
            r = least + tl.arange(0, RANK)
            index = (token[:, None] * most + tl.program_id(1)) * ranks + r[None, :]
            values = tl.load(narrow + index, known[:, None], other=0.0)
            wide = tl.load(
                up + r[:, None] * size + column[None, :], (r < rank)[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)  # fmt: skip
            added = tl.dot(values, wide, added, input_precision="ieee")
        to = out + token[:, None] * out_row + tl.load(address + 3) + column[None, :]
        pair = known[:, None] & inside[None, :]
        before = tl.load(to, pair, other=0.0).to(tl.float32)
        tl.store(to, (before + added).to(out.dtype.element_ty), pair)


def add_lora(out: Tensor, x: Tensor, groups: SlotGroups, table: LoraTable) -> None:
    """The op `add_lora`; the table's addresses are on the device."""
    _check(out, x, groups.tokens, table)
    pieces = [piece for slot, *_ in groups.used for piece in table.pieces[slot]]
    if not pieces:
        return
    blocks = _blocks(groups, out.device)
    rank = max(piece.up.shape[0] for piece in pieces)
    widest = max(piece.up.shape[1] for piece in pieces)
    _launch(out, x, blocks.order, blocks.numbers, table, rank, widest)


def add_lora_blocks(out: Tensor, x: Tensor, blocks: SlotBlocks, table: LoraTable) -> None:
    """add_lora for a table with limits (`rank`, `widest`), with the step's tokens in `blocks`."""
    _check(out, x, blocks.tokens, table)
    _launch(out, x, blocks.order, blocks.numbers, table, table.rank, table.widest)


def _check(out: Tensor, x: Tensor, tokens: int, table: LoraTable) -> None:
    need(len(x) == len(out), f"x must have {len(out)} rows, not {len(x)}")
    need(len(x) == tokens, "x must have as many rows as there are slots")
    fits = x.dtype == torch.int64 or x.shape[1] == table.inputs
    need(fits, f"x must have {table.inputs} numbers, not {list(x.shape[1:])}")


def _launch(
    out: Tensor,
    x: Tensor,
    order: Tensor,
    numbers: Tensor,
    table: LoraTable,
    rank: int,
    widest: int,
) -> None:
    """Launch both kernels. rank, widest: the largest rank and number of outputs of a piece."""
    ids, most = x.dtype == torch.int64, table.addresses.shape[1]
    step = max(16, min(_RANKS, power_of_two(rank)))
    parts = cut(rank, step)
    narrow = torch.empty(len(x), most, parts * step, dtype=torch.float32, device=out.device)
    inputs = x if ids or x.stride(1) == 1 else x.contiguous()
    shared = (order, numbers, table.addresses, narrow, most, parts * step)
    count, dtype = numbers.shape[0], _DTYPES[table.dtype]
    launch(
        _down, (count, most, parts), inputs, inputs.stride(0), *shared, table.inputs,
        IDS=ids, KEPT=dtype, WIDE=x.dtype != table.dtype, ROWS=BLOCK, RANK=step,
        BK=max(16, min(128, power_of_two(table.inputs))),
    )  # fmt: skip
    launch(
        _up, (count, most, cut(widest, _WIDE)), out, out.stride(0), *shared,
        KEPT=dtype, ROWS=BLOCK, RANK=step, BN=_WIDE,
    )  # fmt: skip


def _blocks(groups: SlotGroups, device: torch.device) -> _Blocks:
    """Return the blocks of a step, built once for all layers."""
    cached = _known.get(groups)
    if cached is None or cached.used is not groups.used:
        table = torch.from_numpy(groups.blocks())
        order = groups.order[: groups.tokens]
        if device.type == "cpu":
            order = order.clone()
        else:
            table = table.pin_memory().to(device, non_blocking=True)
            order = order.pin_memory().to(device, non_blocking=True)
        cached = _known[groups] = _Blocks(groups.used, order, table)
    return cached


OPS = {"add_lora": add_lora, "add_lora_blocks": add_lora_blocks}
