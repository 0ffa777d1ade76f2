"""LoRA additions of several adapters in one launch: project down to the rank, then up, and add.

Tokens are grouped in blocks of one adapter, whose matrices are found through a table of addresses.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from modulm_adapters.lora_ops import LoraTable, SlotGroups
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.weights import need

__all__ = ["OPS"]

_ROWS = 16
_WIDE = 64
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
    x, x_row, order, blocks, addresses, narrow, most, inputs,
    IDS: tl.constexpr, KEPT: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    token, known, address = _block(blocks, order, addresses, most, ROWS)
    rank = tl.load(address)
    if rank > 0:
        down = tl.load(address + 1).to(tl.pointer_type(KEPT))
        r = tl.arange(0, RANK)
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
        index = (token[:, None] * most + tl.program_id(1)) * RANK + r[None, :]
        tl.store(narrow + index, total, known[:, None])


@triton.jit
def _up(
    out, out_row, order, blocks, addresses, narrow, most,
    KEPT: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    token, known, address = _block(blocks, order, addresses, most, ROWS)
    rank, size = tl.load(address), tl.load(address + 4)
    if (rank > 0) & (tl.program_id(2) * BN < size):
        up = tl.load(address + 2).to(tl.pointer_type(KEPT))
        r, column = tl.arange(0, RANK), tl.program_id(2) * BN + tl.arange(0, BN)
        inside = column < size
        index = (token[:, None] * most + tl.program_id(1)) * RANK + r[None, :]
        values = tl.load(narrow + index, known[:, None], other=0.0)
        wide = tl.load(
            up + r[:, None] * size + column[None, :], (r < rank)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)  # fmt: skip
        to = out + token[:, None] * out_row + tl.load(address + 3) + column[None, :]
        pair = known[:, None] & inside[None, :]
        before = tl.load(to, pair, other=0.0).to(tl.float32)
        total = before + tl.dot(values, wide, input_precision="ieee")
        tl.store(to, total.to(out.dtype.element_ty), pair)


def add_lora(out: Tensor, x: Tensor, groups: SlotGroups, table: LoraTable) -> None:
    """The op `add_lora`; the table's addresses are on the device."""
    need(len(x) == len(out), f"x must have {len(out)} rows, not {len(x)}")
    need(len(x) == groups.tokens, "x must have as many rows as there are slots")
    ids = x.dtype == torch.int64
    fits = ids or x.shape[1] == table.inputs
    need(fits, f"x must have {table.inputs} numbers, not {list(x.shape[1:])}")
    pieces = [piece for slot, *_ in groups.used for piece in table.pieces[slot]]
    if not pieces:
        return
    blocks, most = _blocks(groups, out.device), table.addresses.shape[1]
    rank = max(16, power_of_two(max(piece.up.shape[0] for piece in pieces)))
    narrow = torch.empty(len(x), most, rank, dtype=torch.float32, device=out.device)
    inputs = x if ids or x.stride(1) == 1 else x.contiguous()
    shared = (blocks.order, blocks.numbers, table.addresses, narrow, most)
    count, dtype = blocks.numbers.shape[0], _DTYPES[table.dtype]
    launch(
        _down, (count, most), inputs, inputs.stride(0), *shared, table.inputs,
        IDS=ids, KEPT=dtype, WIDE=x.dtype != table.dtype, ROWS=_ROWS, RANK=rank,
        BK=max(16, min(128, power_of_two(table.inputs))),
    )  # fmt: skip
    widest = max(piece.up.shape[1] for piece in pieces)
    launch(
        _up, (count, most, cut(widest, _WIDE)), out, out.stride(0), *shared,
        KEPT=dtype, ROWS=_ROWS, RANK=rank, BN=_WIDE,
    )  # fmt: skip


def _blocks(groups: SlotGroups, device: torch.device) -> _Blocks:
    """Return the blocks of a step, built once for all layers."""
    cached = _known.get(groups)
    if cached is None or cached.used is not groups.used:
        numbers = [
            (slot, first, min(_ROWS, end - first))
            for slot, begin, end in groups.used
            for first in range(begin, end, _ROWS)
        ]
        table = torch.from_numpy(np.array(numbers, dtype=np.int32).reshape(-1, 3))
        order = groups.order[: groups.tokens]
        if device.type == "cpu":
            order = order.clone()
        else:
            table = table.pin_memory().to(device, non_blocking=True)
            order = order.pin_memory().to(device, non_blocking=True)
        cached = _known[groups] = _Blocks(groups.used, order, table)
    return cached


OPS = {"add_lora": add_lora}
