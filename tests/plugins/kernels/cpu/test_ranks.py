"""Sums and gathers between ranks through memory that they share; here the ranks are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

kernels = pytest.importorskip(
    "modulm_kernels_cpu", reason="the kernels were not built: make setup builds them where g++ is"
)

LINE = 64


def together(ranks, room, call, each):
    """What `call` gives each rank: each(region's address, rank, ...)."""
    region = np.zeros(ranks * (LINE + 2 * room) + LINE, dtype=np.uint8)
    start = region.ctypes.data + -region.ctypes.data % LINE
    with ThreadPoolExecutor(ranks) as threads:
        return list(
            threads.map(lambda rank: each(call, (start, rank, ranks, room), rank), range(ranks))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (2, 1024), (3, 1000), (4, 5001)])
def test_a_sum_is_made_in_the_order_of_ranks_and_rounded_once(dtype, ranks, size):
    """In slots of 1 KiB: long ones come in several parts, and slots are used again."""
    generator = torch.Generator().manual_seed(size)
    inputs = [torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)]
    code = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[dtype]

    def each(call, region, rank):
        outs = [torch.empty_like(inputs[rank]) for _ in range(3)]
        for out in outs:
            call(*region, inputs[rank].data_ptr(), out.data_ptr(), size, code)
        return outs

    call = kernels.load().call("rank_sum", "pnnnppni")
    expected = inputs[0].float()
    for other in inputs[1:]:
        expected = expected + other.float()
    for outs in together(ranks, 1024, call, each):
        for out in outs:
            assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 16), (3, 3000)])
def test_a_gather_has_all_ranks_parts_side_by_side(rows, width):
    inputs = [
        torch.arange(rows * width, dtype=torch.int32).view(rows, width) + 10000 * r for r in (0, 1)
    ]

    def each(call, region, rank):
        out = torch.empty(rows, 2 * width, dtype=torch.int32)
        call(*region, inputs[rank].data_ptr(), out.data_ptr(), rows, width * 4)
        return out

    call = kernels.load().call("rank_gather", "pnnnppnn")
    for out in together(2, 1024, call, each):
        assert torch.equal(out, torch.cat(inputs, 1))
