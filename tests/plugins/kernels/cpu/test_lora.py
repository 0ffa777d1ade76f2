"""Low-rank additions: as the twin, in every level, and with the same bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import modulm_kernels_cpu
from modulm_adapters.lora_ops import LoraPiece, LoraTable, SlotGroups, add_lora

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
PARTS = (40, 7, 100)


@pytest.fixture(params=modulm_kernels_cpu.levels())
def op(request):
    return modulm_kernels_cpu.ops(request.param)["add_lora"]


def table_of(rank, inputs, dtype, *, ids=False, slots=3):
    table = LoraTable(slots, len(PARTS), inputs, dtype)
    for slot in range(1, slots):  # the last one is empty
        starts = np.cumsum((0, *PARTS)).tolist()
        pieces = []
        for part, start in zip(PARTS[: slot + 1], starts, strict=False):
            down = torch.randn((inputs, rank) if ids else (rank, inputs)) / (
                1 if ids else inputs**0.5
            )
            pieces.append(LoraPiece(down.to(dtype), torch.randn(rank, part).to(dtype), start))
        table.put(slot, pieces)
    return table


def groups_of(slots):
    groups = SlotGroups(3)
    groups.set(np.asarray(slots, dtype=np.int32))
    return groups


@pytest.mark.parametrize("rank", [1, 16, 37])
@pytest.mark.parametrize("dtype_of_table", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_what_the_twin_is(op, dtype, dtype_of_table, rank):
    torch.manual_seed(rank)
    table = table_of(rank, 83, dtype_of_table)
    slots = np.arange(70) * 7 % 4
    x, out = torch.randn(70, 83).to(dtype), torch.randn(70, sum(PARTS)).to(dtype)
    expected, actual = out.clone(), out.clone()
    add_lora(expected, x, groups_of(slots), table)
    op(actual, x, groups_of(slots), table)
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * rank**0.5
    )
    assert torch.equal(actual[slots % 3 == 0], out[slots % 3 == 0])
    assert not torch.equal(actual[slots == 1], out[slots == 1])
    for row in range(0, 70, 9):
        one = out[row : row + 1].clone()
        op(one, x[row : row + 1], groups_of(slots[row : row + 1]), table)
        assert torch.equal(one[0], actual[row])


def test_a_table_of_vectors_is_looked_up(op):
    torch.manual_seed(0)
    table = table_of(5, 30, torch.float32, ids=True)
    slots, ids = [1, 0, 2, 2, 1, 3], torch.tensor([29, 3, 0, 7, 7, 1])
    out = torch.randn(6, sum(PARTS))
    expected, actual = out.clone(), out.clone()
    add_lora(expected, ids, groups_of(slots), table)
    op(actual, ids, groups_of(slots), table)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(actual[0], out[0])
    assert torch.equal(actual[[1, 5]], out[[1, 5]])


def test_rows_that_are_not_dense_and_slots_filled_anew(op):
    torch.manual_seed(0)
    table = table_of(4, 64, torch.float32)
    x, wide = torch.randn(9, 128)[:, :64], torch.zeros(9, 200)
    out, slots = wide[:, 20:167], [1] * 9
    op(out, x, groups_of(slots), table)
    expected = torch.zeros(9, 147)
    add_lora(expected, x, groups_of(slots), table)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert not wide[:, :20].any()
    assert not wide[:, 167:].any()
    table.put(1, ())
    before = out.clone()
    op(out, x, groups_of(slots), table)
    assert torch.equal(out, before)


def test_what_does_not_fit_is_refused(op):
    table = table_of(4, 64, torch.float32)
    with pytest.raises(ValueError, match="x must have 3 rows, not 2"):
        op(torch.zeros(3, 147), torch.zeros(2, 64), groups_of([1, 1, 1]), table)
    with pytest.raises(ValueError, match="x must have 64 numbers, not 63"):
        op(torch.zeros(3, 147), torch.zeros(3, 63), groups_of([1, 1, 1]), table)
    with pytest.raises(ValueError, match="x must have as many rows as there are slots"):
        op(torch.zeros(3, 147), torch.zeros(3, 64), groups_of([1, 1]), table)
    with pytest.raises(ValueError, match="4 pieces, but the limit is 3"):
        table.put(1, [LoraPiece(torch.zeros(1, 64), torch.zeros(1, 8))] * 4)
