"""Sums through symmetric memory on GPUs; skipped where torch sees none.

On one GPU its ranks are streams; with several, each rank is a process with a GPU of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from modulm_distributed.torch_group import sum_in_order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
RANKS = 4
SIZES = (1, 4099, 65_536, 1_000_003)

PROCESS = """
import sys
import torch
from modulm.plugins import manager
from modulm_distributed.mesh import RankSpec, open_mesh
from modulm_distributed.torch_group import TorchGroup

rank, ranks = int(sys.argv[1]), int(sys.argv[2])
driver = manager.current().load("platforms", "rocm" if torch.version.hip else "cuda")
platform = driver()
platform.take_share(rank, ranks)
platform.start()
spec = RankSpec(rank, ranks, 1, "file:" + sys.argv[3])
group = open_mesh(spec, platform, manager.current()).tensor
assert type(group).__name__ == "SymmMemGroup", "see the warning: nccl is used"
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for size in (1, 4099, 65_536, 1_000_003):
        x = torch.randn(size, device=platform.device).to(dtype)
        assert torch.equal(group.all_reduce(x), TorchGroup.all_reduce(group, x)), (dtype, size)
x, graph = torch.ones(8, 4096, device=platform.device), torch.cuda.CUDAGraph()
group.all_reduce(x)
with torch.cuda.graph(graph):
    y = group.all_reduce(group.all_reduce(x) + 1)
    z = group.all_reduce(y)
for turn in range(5):
    x.fill_(turn)
    graph.replay()
    torch.cuda.synchronize()
    assert z.unique().tolist() == [float((turn * ranks + 1) * ranks * ranks)]
"""


def on_streams(inputs, two_shot, memories, streams):
    from modulm_kernels_triton.symmetric_sum import sum_over_ranks

    sums = []
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            sums.append(
                sum_over_ranks(inputs[rank], memories[rank], two_shot=two_shot, limit=1 << 22)
            )
    torch.cuda.synchronize()
    return sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("two_shot", [False, True])
def test_ranks_as_streams_of_one_gpu(two_shot, dtype):
    from modulm_kernels_triton.symmetric_sum import SumConstants, SumMemory, buffer_bytes

    constants = SumConstants.tuned(RANKS)
    buffers = [
        torch.zeros(buffer_bytes(constants), dtype=torch.uint8, device="cuda") for _ in range(RANKS)
    ]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    memories = [SumMemory.of(rank, constants, addresses) for rank in range(RANKS)]
    streams = [torch.cuda.Stream() for _ in range(RANKS)]
    for size in SIZES:
        inputs = [torch.randn(size, device="cuda").to(dtype) for _ in range(RANKS)]
        torch.cuda.synchronize()
        on_streams(inputs, two_shot, memories, streams)  # compiles, which waits may not outlast
        for memory in memories:
            memory.failed.zero_()
        for sums in (on_streams(inputs, two_shot, memories, streams) for _ in range(3)):
            assert not any(memory.failed.item() for memory in memories)
            assert all(torch.equal(total, sum_in_order(inputs)) for total in sums)


def test_ranks_as_processes(tmp_path):
    ranks = min(torch.cuda.device_count(), 8)
    if ranks < 2:
        pytest.skip("needs two GPUs")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(ranks), str(tmp_path / "store")],
            env=os.environ, stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()[-3000:]
