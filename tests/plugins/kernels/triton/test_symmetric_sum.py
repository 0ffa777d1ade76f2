"""Sums over ranks through symmetric memory: the bits of the twin, on every rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from tests.plugins.kernels.triton.ranks_in_turn import in_turn, memories

from modulm_distributed.torch_group import sum_in_order


@pytest.fixture(autouse=True)
def interpreted(device):
    if device.type != "cpu":
        pytest.skip("several ranks of one process are interpreted; tests/gpu has those of GPUs")


def constants(programs=3):
    from modulm_kernels_triton.symmetric_sum import SumConstants

    return SumConstants(
        block=32, programs=programs, room=1024, one_shot=256, most=1 << 20, num_warps=4
    )


def tensors(ranks, size, dtype, seed=0):
    made = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, generator=made) * 8).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("size", [1, 61, 220])
def test_sums_have_the_bits_of_the_twin_on_every_rank(size, two_shot, ranks, dtype):
    from modulm_kernels_triton.symmetric_sum import sum_over_ranks

    inputs = tensors(ranks, size, dtype)
    before = [x.clone() for x in inputs]
    every, _buffers = memories(ranks, constants())
    sums = in_turn(
        ranks, 1, lambda rank: sum_over_ranks(inputs[rank], every[rank], two_shot=two_shot)
    )
    wanted = sum_in_order(inputs)
    assert all(torch.equal(total, wanted) for total in sums)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("seed", range(3))
def test_calls_in_a_row_do_not_disturb_each_other(seed):
    """Sizes of one and two shots, of one and several programs and rounds, in any order of turns."""
    from modulm_kernels_triton.symmetric_sum import sum_over_ranks

    ranks, sizes = 3, [40, 70, 5, 5, 150, 17, 100, 100, 1, 64]
    inputs = [tensors(ranks, size, torch.float32, size + at) for at, size in enumerate(sizes)]
    every, _buffers = memories(ranks, constants(programs=2))

    def work(rank):
        return [sum_over_ranks(each[rank], every[rank]) for each in inputs]

    sums = in_turn(ranks, seed, work)
    for at, each in enumerate(inputs):
        wanted = sum_in_order(each)
        assert all(torch.equal(of_rank[at], wanted) for of_rank in sums), (at, sizes[at])


def test_a_limited_wait_ends_without_the_others():
    from modulm_kernels_triton.symmetric_sum import sum_over_ranks

    every, _buffers = memories(2, constants())
    sum_over_ranks(torch.ones(4), every[0], limit=5)
    assert every[0].failed.item() == 1
    assert every[1].failed.item() == 0


def test_nothing_is_summed_without_numbers():
    from modulm_kernels_triton.symmetric_sum import sum_over_ranks

    every, _buffers = memories(2, constants())
    assert sum_over_ranks(torch.ones(0, 7), every[0]).shape == (0, 7)


def test_values_between_large_ones_are_kept():
    from modulm_kernels_triton.symmetric_sum import sum_over_ranks

    inputs = [torch.full((4,), value).bfloat16() for value in (256.0, 1.0, 1.0)]
    every, _buffers = memories(3, constants())
    sums = in_turn(3, 0, lambda rank: sum_over_ranks(inputs[rank], every[rank]))
    assert sums[0].tolist() == [258.0] * 4


def test_every_number_of_ranks_has_constants():
    from modulm_kernels_triton.symm_mem import MOST_RANKS
    from modulm_kernels_triton.symmetric_sum import SumConstants

    for ranks in range(2, MOST_RANKS + 1):
        sizes = SumConstants.tuned(ranks)
        assert sizes.room // 4 >= ranks * sizes.block
        assert sizes.room % 64 == 0
        assert sizes.one_shot <= sizes.most


SCRIPT = """
import sys
import torch
from modulm_kernels_triton.ahead import compiling_for
from modulm_kernels_triton.symmetric_sum import SumConstants, SumMemory, sum_over_ranks

with compiling_for(*sys.argv[1].split(":")) as compiled:
    for ranks, dtype in ((2, torch.float32), (8, torch.bfloat16)):
        memory = SumMemory.of(1, SumConstants.tuned(ranks), torch.zeros(ranks, dtype=torch.int64))
        for two_shot in (False, True):
            sum_over_ranks(torch.zeros(4, 4096, dtype=dtype), memory, two_shot=two_shot)
for kernel in compiled:
    print("====", kernel.metadata.name)
    print(kernel.asm.get("ptx") or kernel.asm.get("amdgcn"))
"""
#: What a meeting compiles to: stores are done before signals, and loads come after them.
MEETING = {
    "cuda": (
        r"bar\.sync(?:(?!st\.global).)*atom\.global\.sys\.release\.exch\.b32.*"
        r"atom\.global\.sys\.acquire\.add\.u32.*bar\.sync"
    ),
    "hip": (
        r"s_waitcnt vmcnt\(0\)\s+buffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\).*s_barrier.*"
        r"global_atomic_swap.*buffer_inv sc0 sc1\s+s_waitcnt vmcnt\(0\).*s_barrier"
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950"])
def test_kernels_are_compiled_for_gpus_that_are_not_there(target, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    _, *kernels = done.stdout.split("==== _")
    assert [text.partition("\n")[0] for text in kernels] == ["one_shot", "two_shot"] * 2
    for text in kernels:
        assert re.search(MEETING[target.split(":")[0]], text, re.DOTALL)
