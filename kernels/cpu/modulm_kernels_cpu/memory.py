"""Memory for packed weights, aligned to huge pages and advised to use them."""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

__all__ = ["huge_buffer", "in_huge_pages"]

_HUGE = 2 << 20
_ALIGNMENT = 64
#: Buffers from here on come from huge pages, those below `_LARGE` from areas that they share.
_SMALL, _LARGE = 64 << 10, 8 << 20
_AREA = 16 << 20

_lock = threading.Lock()
_area: mmap.mmap | None = None
_used = 0


def huge_buffer(size: int) -> Tensor:
    """Return [size] zeroed bytes, backed by huge pages unless they are few.

    Weights are read sequentially once per token; with 4 KB pages, a seventh of the time is spent on
    address translation, and for matrices of 1 MB half of it. Buffers smaller than a few huge pages
    lie next to each other in areas of 16 MB; an area is freed with the last of them.
    """
    global _area, _used
    if size < _SMALL:
        return torch.zeros(size, dtype=torch.uint8)
    if size >= _LARGE:
        return _part(*_advised(size), size)
    with _lock:
        if _area is None or _used + size > len(_area):
            _area, _used = _advised(_AREA)
        area, start = _area, _used
        _used += -(-size // _ALIGNMENT) * _ALIGNMENT
    return _part(area, start, size)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of `tensor` in a `huge_buffer`; the tensor itself if it is small."""
    if tensor.nbytes < _SMALL:
        return tensor
    return huge_buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _advised(size: int) -> tuple[mmap.mmap, int]:
    """Map `size` bytes from the start of a huge page on; return the mapping and that start."""
    area = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    return area, -whole.data_ptr() % _HUGE


def _part(area: mmap.mmap, start: int, size: int) -> Tensor:
    return torch.frombuffer(area, dtype=torch.uint8, count=size, offset=start)
