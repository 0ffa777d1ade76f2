"""Copies between host and device that nobody waits for, through memory that stays in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from modulm.contracts.platform import Staging, Transfer

__all__ = ["PinnedStaging", "PinnedTransfer"]

#: Host buffers in turn: one is filled again when its copy of so many calls ago is done.
_BUFFERS = 4
_ALIGNMENT = 16


class _Buffer:
    def __init__(self) -> None:
        self.host = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event()


class PinnedStaging(Staging):
    """All arrays of a call in one copy, from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buffers = [_Buffer() for _ in range(_BUFFERS)]
        self._turn = 0

    def send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        sources = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        sizes = [-(-source.nbytes // _ALIGNMENT) * _ALIGNMENT for source in sources]
        starts = np.cumsum([0, *sizes]).tolist()
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _BUFFERS
        buffer.copied.synchronize()
        if buffer.host.numel() < starts[-1]:
            buffer.host = torch.empty(2 * starts[-1], dtype=torch.uint8, pin_memory=True)
        for start, source in zip(starts, sources, strict=False):
            _part(buffer.host, start, source).copy_(source)
        whole = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
        whole.copy_(buffer.host[: starts[-1]], non_blocking=True)
        buffer.copied.record()
        return tuple(
            _part(whole, start, source) for start, source in zip(starts, sources, strict=False)
        )


def _part(whole: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes of `whole` from `start` on as a tensor like another one."""
    return whole[start : start + like.nbytes].view(like.dtype).view(like.shape)


class PinnedTransfer(Transfer):
    """One event behind the copies of all tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__([torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors])
        for target, source in zip(self._tensors, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> tuple[np.ndarray, ...]:
        self._done.synchronize()
        return super().wait()
