"""A platform that runs prepared shapes only, as a device with a compiler for static shapes does."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from modulm.contracts.attention import StepLayout
from modulm.contracts.platform import Memory, Platform, Probe, StepSizes
from modulm.testing.queued import QueuedPlatform

SIZES = StepSizes(rows=(4, 8), tokens=(8, 24, 48), samples=(4, 16))


class PaddedDevice(Platform):
    """The CPU, which notes the shapes of attention's steps."""

    name = "padded"
    api = 1
    attention = ("sdpa",)
    layouts: ClassVar[list[StepLayout]] = []

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1, "a CPU that wants every shape padded")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> Memory:
        return Memory(1 << 30, 1 << 30)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float32",)

    def step_sizes(self, rows: int, tokens: int) -> StepSizes:
        return SIZES

    def attending(self, backend: Any) -> Any:
        return watched(backend, self.layouts)


class PaddedQueue(QueuedPlatform):
    """The same with a queue of work: what the host must not read, it does not."""

    name = "padded_queue"
    layouts: ClassVar[list[StepLayout]] = []

    def step_sizes(self, rows: int, tokens: int) -> StepSizes:
        return SIZES

    def attending(self, backend: Any) -> Any:
        return watched(backend, self.layouts)


def watched(backend: Any, layouts: list[StepLayout]) -> Any:
    """The backend, whose steps are noted."""
    plan = backend.plan

    def noted(step: StepLayout) -> Any:
        layouts.append(step)
        return plan(step)

    backend.plan = noted
    return backend


def shapes(layout: StepLayout) -> tuple[int, int, int]:
    """Rows, columns of the block table, tokens."""
    rows, columns = layout.block_tables.shape
    assert len(layout.context_lens) == len(layout.query_starts) - 1 == rows
    assert int(np.diff(layout.query_starts).min()) > 0
    return rows, columns, len(layout.slots)
