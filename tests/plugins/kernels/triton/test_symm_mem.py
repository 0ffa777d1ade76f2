"""Which ranks sum through symmetric memory, and what they do when one of them cannot."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
import torch
from tests.plugins.kernels.triton.ranks_in_turn import in_turn, memories
from torch._C import _distributed_c10d as c10d

from modulm.contracts.decision import Verdict
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm_distributed.choice import choose_collectives
from modulm_distributed.collectives import Members
from modulm_distributed.torch_group import TorchGroup, sum_in_order


@pytest.fixture(autouse=True)
def interpreted(device):
    if device.type != "cpu":
        pytest.skip("stands in for GPUs; tests/gpu has those")


def platform(kind="cuda", index=0):
    return SimpleNamespace(
        name="cuda", device=torch.device(kind, index), collectives=("symm_mem", "nccl"),
        dtypes=("float32",), synchronize=lambda: None,
    )  # fmt: skip


def members(rank=0, size=2, store=None, **more):
    return Members("tensor 0", rank, size, store or c10d.HashStore(), **more)


@pytest.fixture
def built_for_gpus(monkeypatch):
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", object, raising=False)


def verdicts(platform, members, **more):
    chosen = choose_collectives(platform, members, manager.current(), **more)
    return chosen.decision.winner, {
        verdict.name: verdict.reason for verdict in chosen.decision.candidates
    }


def test_ranks_on_gpus_of_one_machine_take_it(built_for_gpus):
    assert verdicts(platform(), members()) == ("symm_mem", {"symm_mem": None, "nccl": None})


@pytest.mark.parametrize(
    ("where", "ranks", "reason"),
    [
        ("cpu", {}, "must run on GPUs"),
        ("cuda", {"one_host": False}, "must be on one machine"),
        ("cuda", {"size": 16}, "at most 8 ranks, not 16"),
    ],
)
def test_others_have_a_reason(built_for_gpus, where, ranks, reason):
    winner, of = verdicts(platform(where), members(**ranks))
    assert winner == "nccl"
    assert reason in of["symm_mem"]


def test_chips_of_amd_without_the_instructions(built_for_gpus, monkeypatch):
    from modulm_kernels_triton import device

    for chip, taken in (("gfx942", True), ("gfx950", True), ("gfx90a", False)):
        monkeypatch.setattr(device, "target", lambda chip=chip: ("hip", chip))
        reason = verdicts(platform(), members())[1]["symm_mem"]
        assert (reason is None) == taken
    assert "not gfx90a" in reason


def test_the_flag_leaves_it_out(built_for_gpus):
    winner, of = verdicts(platform(), members(), custom=False)
    assert (winner, of["symm_mem"]) == ("nccl", "--disable-custom-all-reduce")


def test_without_any_the_reasons_remain():
    chosen = choose_collectives(platform(), members(), PluginManager())
    assert chosen.driver is None
    assert all(isinstance(each, Verdict) and each.reason for each in chosen.decision.candidates)


class Gathering(TorchGroup):
    """Stands in for NCCL: what a rank hands in is noted."""

    def all_reduce(self, x):
        self.backend.append(x)
        return x


def together(ranks, work):
    """Call `work(rank)` in a thread for each rank, at the same time."""
    results = [None] * ranks

    def run(rank):
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return results


@pytest.fixture
def connected(monkeypatch, caplog):
    """Connect two ranks whose kernels are those of their twins; returns groups and log."""
    from modulm_kernels_triton import symm_mem

    caplog.set_level(logging.INFO, logger="modulm")

    def of(map_buffers, *, indices=(0, 1), access=True, wrong=None):
        store = c10d.HashStore()
        monkeypatch.setattr(symm_mem.torch.cuda, "can_device_access_peer", lambda *_: access)
        monkeypatch.setattr(symm_mem, "_wrong", lambda *_: wrong)

        def rank(number):
            own = platform("cuda", indices[number])
            group = Gathering(number, 2, [], torch.device("cpu"))
            return symm_mem.connect(group, own, members(number, store=store), map_buffers)

        return together(2, rank), caplog.text

    return of


def cannot_map(platform, members, size):
    raise RuntimeError("no fabric\nat line 5")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"indices": (3, 3)}, "several ranks share a GPU"),
        ({"access": False}, "cannot access the memory of GPU"),
        ({}, "torch cannot share their memory: no fabric"),
    ],
)
def test_all_ranks_fall_back_for_the_reason_of_one(connected, facts, reason):
    groups, text = connected(cannot_map, **facts)
    assert [type(group) for group in groups] == [Gathering, Gathering]
    assert "ranks of tensor 0 do not sum with symm_mem but nccl: " in text
    assert reason in text
    assert "at line 5" not in text


def small():
    from modulm_kernels_triton.symmetric_sum import SumConstants

    return SumConstants(block=32, programs=2, room=1024, one_shot=256, most=1200, num_warps=4)


def test_what_the_kernels_do_not_take_goes_to_the_backend():
    from modulm_kernels_triton.symm_mem import SymmMemGroup

    gathered = []

    class Backend:
        def allgather(self, outputs, inputs):
            gathered.append(inputs[0])
            for out in outputs[0]:
                out.copy_(inputs[0])
            return SimpleNamespace(wait=lambda: None)

    every, _buffers = memories(2, small())
    group = SymmMemGroup(0, 2, Backend(), torch.device("cpu"), memory=every[0])
    assert group.all_reduce(torch.tensor([3, 4])).tolist() == [6, 8]
    assert group.all_reduce(torch.ones(301)).tolist() == [2.0] * 301
    assert len(gathered) == 2


def test_groups_sum_rows_and_columns():
    from modulm_kernels_triton.symm_mem import SymmMemGroup

    every, _buffers = memories(3, small())
    inputs = [torch.randn(5, 7) for _ in range(3)]

    def work(rank):
        group = SymmMemGroup(rank, 3, None, torch.device("cpu"), memory=every[rank])
        return group.all_reduce(inputs[rank]), group.all_reduce(inputs[rank].T)

    wanted = sum_in_order(inputs)
    for rows, columns in in_turn(3, 4, work):
        assert torch.equal(rows, wanted)
        assert torch.equal(columns, wanted.T)


def test_the_check_at_the_start_tells_right_sums_from_wrong_ones(monkeypatch):
    from modulm_kernels_triton import symm_mem

    monkeypatch.setattr(symm_mem, "_CHECKED", (35,))
    here = SimpleNamespace(device=torch.device("cpu"), dtypes=("float16",))
    every, _buffers = memories(2, small())
    assert in_turn(2, 0, lambda rank: symm_mem._wrong(here, every[rank])) == [None, None]
    monkeypatch.setattr(symm_mem, "_LOOKS", 3)
    alone, _kept = memories(2, small())
    assert "signals" in symm_mem._wrong(here, alone[0])
    monkeypatch.setattr(symm_mem, "sum_in_order", lambda inputs: inputs[0])
    monkeypatch.setattr(symm_mem, "_LOOKS", 1 << 24)
    every, _buffers = memories(2, small())
    wrong = in_turn(2, 0, lambda rank: symm_mem._wrong(here, every[rank]))
    assert wrong == ["a sum of known numbers was wrong"] * 2


def test_ranks_that_pass_the_check_sum_with_it(monkeypatch, caplog):
    from modulm_kernels_triton import symm_mem

    caplog.set_level(logging.INFO, logger="modulm")
    monkeypatch.setattr(symm_mem, "_wrong", lambda *_: None)
    monkeypatch.setattr(symm_mem, "_unreachable", lambda *_: None)
    store = c10d.HashStore()
    buffers = [torch.zeros(1 << 20, dtype=torch.int64) for _ in range(2)]

    def rank(number):
        group = Gathering(number, 2, [], torch.device("cpu"))
        addresses = [buffer.data_ptr() for buffer in buffers]
        return symm_mem.connect(
            group, platform("cpu", 0), members(number, store=store), lambda *_: (addresses, buffers)
        )

    groups = together(2, rank)
    assert [(type(group).__name__, group.rank) for group in groups] == [
        ("SymmMemGroup", 0), ("SymmMemGroup", 1)
    ]  # fmt: skip
    assert caplog.text.count("ranks of tensor 0 sum through symmetric memory") == 1
    assert torch.equal(groups[0].memory.addresses, groups[1].memory.addresses)
