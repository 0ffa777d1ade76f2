"""Memory of packed weights."""

from __future__ import annotations

import pytest
import torch

from modulm_kernels_cpu import linear, memory
from modulm_kernels_cpu.library import load
from modulm_kernels_cpu.memory import huge_buffer, in_huge_pages
from modulm_kernels_cpu.moe import moe_ops

KB = 1 << 10


@pytest.mark.parametrize("size", [1, 64 * KB - 1, 64 * KB, 1000 * KB + 3, 8192 * KB, 9000 * KB])
def test_a_buffer_is_zero_aligned_and_has_its_size(size):
    buffer = huge_buffer(size)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (size,)
    assert buffer.data_ptr() % 64 == 0
    assert buffer.untyped_storage().nbytes() == size  # what is saved or sent with it
    assert not buffer.any()


def test_buffers_that_share_an_area_do_not_overlap():
    buffers = [huge_buffer(3000 * KB + 1) for _ in range(8)]
    for value, buffer in enumerate(buffers):
        buffer.fill_(value)
    assert all((buffer == value).all() for value, buffer in enumerate(buffers))


def test_an_area_lives_as_long_as_its_last_buffer():
    first = huge_buffer(100 * KB).fill_(7)
    for _ in range(3 * memory._AREA // (4096 * KB)):
        huge_buffer(4096 * KB).fill_(1)
    assert (first == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_tensor_is_copied_with_its_shape_unless_it_is_small(dtype):
    large = torch.arange(512 * 200).view(512, 200).to(dtype)
    copied = in_huge_pages(large)
    assert torch.equal(copied, large)
    assert copied.dtype == dtype
    assert copied.data_ptr() != large.data_ptr()
    small = torch.ones(8, 8, dtype=dtype)
    assert in_huge_pages(small) is small


def test_scales_and_zero_points_of_experts_lie_in_huge_pages(monkeypatch):
    moved = []

    def recorded(tensor):
        moved.append(in_huge_pages(tensor))
        return moved[-1]

    monkeypatch.setattr(linear, "in_huge_pages", recorded)
    codes = torch.full((64, 64), 3, dtype=torch.uint8)
    scales, zeros = torch.ones(64, 2), torch.full((64, 2), 7.0)
    ops = moe_ops(load())
    stack = ((codes, scales, zeros) for _ in range(2))
    packed = ops["pack_quantized_experts"](stack, 2, "int4", 32)
    assert [x.data_ptr() for x in moved] == [
        packed.whole.scales.data_ptr(),
        packed.whole.zeros.data_ptr(),
    ]
