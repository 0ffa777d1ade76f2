"""Low-rank additions: as the twin, of different adapters in one launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import modulm_kernels_triton.add_lora
from modulm_adapters.lora_ops import LoraPiece, LoraTable, SlotBlocks, SlotGroups, add_lora

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3}
PARTS = (40, 7, 100)


@pytest.fixture
def op(ops):
    return ops["add_lora"]


def table_of(rank, inputs, dtype, device, *, ids=False, slots=3):
    table = LoraTable(slots, len(PARTS), inputs, dtype, device)
    for slot in range(1, slots):  # the last one is empty
        starts = np.cumsum((0, *PARTS)).tolist()
        pieces = []
        for part, start in zip(PARTS[: slot + 1], starts, strict=False):
            down = torch.randn((inputs, rank) if ids else (rank, inputs)) / (
                1 if ids else inputs**0.5
            )
            pieces.append(
                LoraPiece(down.to(device, dtype), torch.randn(rank, part).to(device, dtype), start)
            )
        table.put(slot, pieces)
    return table


def groups_of(slots):
    groups = SlotGroups(3)
    groups.set(np.asarray(slots, dtype=np.int32))
    return groups


@pytest.mark.parametrize("rank", [1, 37])
@pytest.mark.parametrize("dtype_of_table", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_it_is_what_the_twin_is(op, device, dtype, dtype_of_table, rank):
    table = table_of(rank, 83, dtype_of_table, device)
    slots = np.arange(70) * 7 % 4
    x = torch.randn(70, 83).to(device, dtype)
    out = torch.randn(70, sum(PARTS)).to(device, dtype)
    expected, actual = out.clone(), out.clone()
    add_lora(expected, x, groups_of(slots), table)
    op(actual, x, groups_of(slots), table)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound * rank**0.5)
    assert torch.equal(actual[slots % 3 == 0], out[slots % 3 == 0])
    assert not torch.equal(actual[slots == 1], out[slots == 1])
    one = out[22:23].clone()
    op(one, x[22:23], groups_of(slots[22:23]), table)
    torch.testing.assert_close(one[0], actual[22], rtol=bound, atol=bound)


def test_a_table_of_vectors_is_looked_up(op, device):
    table = table_of(5, 30, torch.float32, device, ids=True)
    slots, ids = [1, 0, 2, 2, 1, 3], torch.tensor([29, 3, 0, 7, 7, 1]).to(device)
    out = torch.randn(6, sum(PARTS)).to(device)
    expected, actual = out.clone(), out.clone()
    add_lora(expected, ids, groups_of(slots), table)
    op(actual, ids, groups_of(slots), table)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(actual[0], out[0])
    assert torch.equal(actual[[1, 5]], out[[1, 5]])


def test_rows_that_are_not_dense_slots_filled_anew_and_groups_set_anew(op, device):
    table = table_of(4, 64, torch.float32, device)
    x, wide = torch.randn(9, 128).to(device)[:, :64], torch.zeros(9, 200, device=device)
    out, groups = wide[:, 20:167], groups_of([1] * 9)
    op(out, x, groups, table)
    expected = torch.zeros(9, 147, device=device)
    add_lora(expected, x, groups, table)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert not wide[:, :20].any()
    assert not wide[:, 167:].any()
    groups.set(np.array([0, 2] * 4 + [0], dtype=np.int32))
    op(out, x, groups, table)
    add_lora(expected, x, groups, table)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    table.put(1, ())
    before = out.clone()
    op(out, x, groups_of([1] * 9), table)
    assert torch.equal(out, before)


def test_what_does_not_fit_is_refused(op, device):
    table = table_of(4, 64, torch.float32, device)
    with pytest.raises(ValueError, match="x must have 3 rows, not 2"):
        op(torch.zeros(3, 147), torch.zeros(2, 64), groups_of([1, 1, 1]), table)
    with pytest.raises(ValueError, match="x must have 64 numbers"):
        op(torch.zeros(3, 147), torch.zeros(3, 63), groups_of([1, 1, 1]), table)
    with pytest.raises(ValueError, match="x must have as many rows as there are slots"):
        op(torch.zeros(3, 147), torch.zeros(3, 64), groups_of([1, 1]), table)


def test_launches_are_repeated_for_other_tokens_and_adapters(ops, device, monkeypatch):
    """What is launched for slots of zeros, run again after slots and adapters have changed."""
    table = LoraTable(3, len(PARTS), 83, torch.float32, device, rank=70, widest=max(PARTS))
    groups, blocks = SlotGroups(3), SlotBlocks(3, torch.device(device))
    x, out = torch.randn(40, 83).to(device), torch.randn(40, sum(PARTS)).to(device)
    before, launches = out.clone(), []

    def kept(kernel, grid, *args, **meta):
        launches.append((kernel, grid, args, meta))

    def put(slots):
        groups.set(np.asarray(slots, dtype=np.int32))
        blocks.set(groups, lambda arrays: [torch.from_numpy(a).to(device) for a in arrays])

    put([0] * 40)
    with monkeypatch.context() as patch:
        patch.setattr(modulm_kernels_triton.add_lora, "launch", kept)
        ops["add_lora_blocks"](out, x, blocks, table)
    for seed, slots in enumerate((np.arange(40) * 7 % 4, [0] * 40, [2] * 33 + [1, 3] + [0] * 5)):
        for slot, rank in ((1, 4 + seed), (2, 70 - seed), (3, 20)):
            torch.manual_seed(slot + seed)
            pieces = [
                LoraPiece(
                    torch.randn(rank, 83).to(device) / 9, torch.randn(rank, part).to(device), start
                )
                for part, start in zip(PARTS[:slot], np.cumsum((0, *PARTS)).tolist(), strict=False)
            ]
            table.put(slot, pieces)
        put(slots)
        out.copy_(before)
        for kernel, grid, args, meta in launches:
            kernel[grid](*args, **meta)
        expected = before.clone()
        add_lora(expected, x, groups, table)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(out, before) == (not groups.used)
        straight = before.clone()
        ops["add_lora_blocks"](straight, x, blocks, table)
        assert torch.equal(straight, out)
