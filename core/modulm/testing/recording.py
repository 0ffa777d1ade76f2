"""A kernel provider that replays steps on any device, like a graph recorder."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from modulm.contracts.kernels import Forward, KernelProvider, Op
from modulm.contracts.model import Batch
from modulm.contracts.platform import Platform, Probe
from modulm.ops.recording import FixedInputs, signature

__all__ = ["Repeater", "RepeatingKernels"]


class Repeater:
    """Runs a step on the first batch of its signature, with the later batch's tensors copied in.

    Whatever a batch or plan does not list in its tensors, tables and key keeps the first batch's
    value, as in a CUDA graph, so results are wrong if it mattered. recorded, repeated: number of
    steps. passed: steps that could not be recorded.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._recorded: dict[Hashable, FixedInputs[Batch]] = {}
        self.repeated = self.passed = 0

    @property
    def recorded(self) -> int:
        return len(self._recorded)

    def __call__(self, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        key = signature(batch)
        if key is None:
            self.passed += 1
            return self._forward(batch)
        inputs = self._recorded.get(key)
        if inputs is None:
            inputs = self._recorded[key] = FixedInputs(batch)
        else:
            self.repeated += 1
            inputs.put(batch)
        return self._forward(inputs.step)


class RepeatingKernels(KernelProvider):
    """A provider without ops; `repeaters` has one entry per model."""

    name = "repeating"
    api = 1

    def __init__(self) -> None:
        self.repeaters: list[Repeater] = []

    @classmethod
    def probe(cls, platform: Platform) -> Probe:
        return Probe(1, "torch is always available")

    def ops(self) -> Mapping[str, Op]:
        return {}

    def recorded(self, forward: Forward) -> Forward:
        self.repeaters.append(Repeater(forward))
        return self.repeaters[-1]
