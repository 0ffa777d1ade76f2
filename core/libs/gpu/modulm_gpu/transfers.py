"""Asynchronous copies between host and device, on a separate stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from modulm.contracts.platform import Staging, Transfer
from modulm_gpu.runtime import Runtime, Stream

__all__ = ["PinnedStaging", "PinnedTransfer"]

#: Number of alternating host buffers; a buffer is reused when its copy, this many calls ago, is
#: done.
_BUFFERS = 4
_ALIGNMENT = 16


class _Buffer:
    def __init__(self, runtime: Runtime) -> None:
        self.host = torch.empty(0, dtype=torch.uint8)
        self.copied: Any = runtime.module.Event()


class PinnedStaging(Staging):
    """Copies all arrays of a call at once from pinned memory, asynchronously.

    Work launched afterwards waits for the copy on the device.
    """

    def __init__(self, runtime: Runtime, device: torch.device, copies: Stream) -> None:
        super().__init__(device)
        self._runtime, self._copies = runtime, copies
        self._buffers = [_Buffer(runtime) for _ in range(_BUFFERS)]
        self._turn = 0

    def send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        sources = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        sizes = [-(-source.nbytes // _ALIGNMENT) * _ALIGNMENT for source in sources]
        starts = np.cumsum([0, *sizes]).tolist()
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _BUFFERS
        buffer.copied.synchronize()
        if buffer.host.numel() < starts[-1]:
            buffer.host = self._runtime.pinned((2 * starts[-1],), torch.uint8)
        for start, source in zip(starts, sources, strict=False):
            _part(buffer.host, start, source).copy_(source)
        module = self._runtime.module
        working = module.current_stream()
        with module.stream(self._copies):
            whole = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
            whole.copy_(buffer.host[: starts[-1]], non_blocking=True)
            buffer.copied.record()
        # The memory belongs to the copy stream; it must not be reused before the work is done.
        working.wait_event(buffer.copied)
        self._runtime.used_by(whole, working)
        return tuple(
            _part(whole, start, source) for start, source in zip(starts, sources, strict=False)
        )


def _part(whole: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes of `whole` from `start` on, as a tensor like `like`."""
    return whole[start : start + like.nbytes].view(like.dtype).view(like.shape)


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
