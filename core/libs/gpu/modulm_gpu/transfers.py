"""Asynchronous copies between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from modulm.contracts.platform import Staging, Transfer
from modulm_gpu.runtime import Runtime, Stream

__all__ = ["PinnedStaging", "PinnedTransfer"]

#: Number of alternating host buffers; a buffer is reused when its copy, this many calls ago, is
#: done.
_BUFFERS = 16
_ALIGNMENT = 16


class _Buffer:
    """Pinned host memory and the event of the last copy from it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.copied: Any = runtime.module.Event()
        self.reserve(0)

    def reserve(self, size: int) -> None:
        """Have room for `size` bytes."""
        self.pinned = self._runtime.pinned((2 * size,), torch.uint8)
        self.array = self.pinned.numpy()


class PinnedStaging(Staging):
    """Copies all arrays of a call at once from pinned memory, in the order of the device's work.

    A step sends some kilobytes: a stream of their own would cost the host more than it saves.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        super().__init__(device)
        self._buffers = [_Buffer(runtime) for _ in range(_BUFFERS)]
        self._turn = 0

    def send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _BUFFERS
        buffer.copied.synchronize()
        if len(buffer.array) < size:
            buffer.reserve(size)
        for start, array in zip(starts, arrays, strict=True):
            target = buffer.array[start : start + array.nbytes]
            target.view(array.dtype).reshape(array.shape)[...] = array
        whole = torch.empty(size, dtype=torch.uint8, device=self.device)
        whole.copy_(buffer.pinned[:size], non_blocking=True)
        buffer.copied.record()
        typed: dict[np.dtype[Any], torch.Tensor] = {}
        sent = []
        for start, array in zip(starts, arrays, strict=True):
            base = typed.get(array.dtype)
            if base is None:
                base = typed[array.dtype] = whole.view(_torch_dtype(array.dtype))
            shape = array.shape
            strides = (1,) if len(shape) == 1 else _strides(shape)
            sent.append(base.as_strided(shape, strides, start // array.itemsize))
        return tuple(sent)


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


class PinnedTransfer(Transfer):
    """Starts when the work queued so far is done; later work runs concurrently."""

    def __init__(self, runtime: Runtime, tensors: Sequence[torch.Tensor], copies: Stream) -> None:
        super().__init__([runtime.pinned(t.shape, t.dtype) for t in tensors])
        module = runtime.module
        copies.wait_stream(module.current_stream())
        with module.stream(copies):
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
                runtime.used_by(source, copies)
            self._done: Any = module.Event()
            self._done.record()

    def wait(self) -> tuple[np.ndarray, ...]:
        self._done.synchronize()
        return super().wait()
