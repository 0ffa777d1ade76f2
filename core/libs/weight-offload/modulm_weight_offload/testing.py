"""A test device with two queues: one for work, and one for copies from host memory.

Nothing runs before it is waited for, and each queue runs in order: a copy waits for the work that
was launched before it, and work waits for a copy only if it was told to.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from modulm.contracts.kernels import KernelProvider
from modulm.contracts.platform import Platform, Probe
from modulm.ops import twins
from modulm.testing.queued import Queue, QueuedPlatform, really
from modulm_weight_offload.contract import HostCopies

__all__ = ["DenseKernels", "MappingPlatform", "OffloadPlatform", "QueuedCopies"]


class QueuedCopies(HostCopies):
    """Copies in a queue of their own. `log` has what was asked for and what ran, in order.

    Copies are numbered in the order in which they start: "start 0", "copy 0", "wait 0".
    """

    def __init__(self, work: Queue, *, maps: bool) -> None:
        self._work, self._maps, self.queue = work, maps, Queue()
        self.log: list[str] = []
        #: Addresses of host memory, and its bytes.
        self.memory: dict[int, int] = {}
        self._started = 0

    def allocate(self, size: int) -> Tensor:
        with really():
            memory = torch.empty(size, dtype=torch.uint8)
        self.memory[memory.data_ptr()] = size
        return memory

    def mapped(self, memory: Tensor) -> Tensor | None:
        return memory if self._maps else None

    def start(self, target: Tensor, source: Tensor) -> tuple[int, int]:
        number, ordered = self._started, self._work.ordered
        self._started += 1
        self.log.append(f"start {number}")

        def copy() -> None:
            self._work.drain(ordered)
            self.log.append(f"copy {number}")
            target.copy_(source)

        return number, self.queue.put(copy)

    def wait(self, copy: Any) -> None:
        number, until = copy
        self.log.append(f"wait {number}")
        self._work.put(lambda: self.queue.drain(until))

    def host(self) -> AbstractContextManager[object]:
        return really()


class OffloadPlatform(QueuedPlatform):
    """Register it as platform "offload" and run with `device="offload"`.

    maps: whether the device reads host memory where it is.
    """

    name: ClassVar[str] = "offload"
    kernels: ClassVar[tuple[str, ...]] = ("dense",)
    maps: ClassVar[bool] = False
    #: The copies of the model loaded last.
    copies: ClassVar[QueuedCopies]

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[QueuedCopies] = []

    def host_copies(self) -> HostCopies:
        OffloadPlatform.copies = copies = QueuedCopies(self._work, maps=type(self).maps)
        self._copies.append(copies)
        return copies

    def synchronize(self) -> None:
        super().synchronize()
        for copies in self._copies:
            copies.queue.drain(copies.queue.ordered)


class MappingPlatform(OffloadPlatform):
    """The same with a device that reads host memory where it is: `device="mapping"`."""

    name = "mapping"
    maps = True


class DenseKernels(KernelProvider):
    """Experts without a read by the host: register it as kernels "dense"."""

    name = "dense"
    api = 1

    @classmethod
    def probe(cls, platform: Platform) -> Probe:
        return Probe(1, "computes all experts for all tokens")

    def ops(self) -> Mapping[str, Any]:
        return {"fused_experts": _fused_experts, "pack_experts": twins.pack_experts}


def _fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    act: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """See `modulm.ops.twins.fused_experts`."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(len(gate_up)):
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        both = F.linear(x, gate_up[expert], bias)
        if act == "clamped_swiglu":
            gate, up = both.chunk(2, dim=-1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (up + 1) * gate * torch.sigmoid(alpha * gate)
        else:
            inner = twins.act_and_mul(both, act)
        bias = None if down_bias is None else down_bias[expert]
        share = (weights * (ids == expert)).sum(-1, keepdim=True)
        total = total + F.linear(inner, down[expert], bias).float() * share
    return total.to(x.dtype)
