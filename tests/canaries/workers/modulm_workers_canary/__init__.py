"""Functions that run in each worker: they take the worker, then plain values."""

from __future__ import annotations

import fcntl
from pathlib import Path

import numpy as np
import torch

from modulm.contracts.executor import WorkerHandle
from modulm.engine.worker.worker import Worker


def checksum(worker: WorkerHandle, scale: float = 1.0, *, digits: int = 3) -> dict[str, object]:
    """The rank, and what its weights add up to. norms: [weights] float64."""
    norms = [float(weight.float().norm()) for weight in worker.model.parameters()]
    total = round(scale * sum(norms), digits)
    return {"rank": worker.rank, "sum": total, "norms": np.array(norms)}


def fail_on(worker: WorkerHandle, rank: int) -> None:
    """Raise on one rank."""
    if worker.rank == rank:
        raise ValueError("on purpose")


def wait_for_lock(worker: WorkerHandle, path: str) -> None:
    """Return once nobody has the file locked."""
    with Path(path).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def make_tensor(worker: WorkerHandle) -> torch.Tensor:
    """Return what is no plain value."""
    return torch.ones(2)


def count_weights(model: torch.nn.Module) -> int:
    """How many weights a rank's part of the model has."""
    return sum(1 for _ in model.parameters())


class Doubling:
    """Methods for workers (`--worker-extension-cls`)."""

    rank: int

    def double_rank(self, plus: int = 0) -> int:
        return 2 * self.rank + plus


class Closing:
    """An extension that would replace a method of the worker."""

    def close(self) -> None:
        raise RuntimeError("never called")


class LabelledWorker(Worker):
    """A worker (`--worker-cls`) with a method that can be called."""

    def label(self, suffix: str) -> str:
        return f"rank {self.rank}{suffix}"

    def _secret(self) -> str:
        return "not to be called"
