"""Copies of weights from pinned host memory, on a stream of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modulm_gpu.runtime import Runtime, Stream
from modulm_weight_offload.contract import HostCopies

__all__ = ["StreamCopies"]


class StreamCopies(HostCopies):
    """Copies on a stream; `mapped` tensors are the host's memory at the device's same address."""

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._runtime, self._device = runtime, device
        self._stream: Stream = runtime.module.Stream()

    def allocate(self, size: int) -> Tensor:
        return self._runtime.pinned((size,), torch.uint8)

    def mapped(self, memory: Tensor) -> Tensor | None:
        return self._runtime.mapped(memory)

    def start(self, target: Tensor, source: Tensor) -> Any:
        module = self._runtime.module
        self._stream.wait_stream(module.current_stream())
        with module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = module.Event()
            done.record()
        return done

    def wait(self, copy: Any) -> None:
        self._runtime.module.current_stream().wait_event(copy)
