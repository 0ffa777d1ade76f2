"""What running workers hold in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modulm.contracts.executor import WorkerHandle

__all__ = ["device_bytes"]


def device_bytes(worker: WorkerHandle) -> int | None:
    """Return the bytes of a worker's tensors in the memory of its device.

    A worker function: call it with `collective_rpc`. None if the platform does not measure them,
    since its tensors are in the process's memory.
    """
    return worker.platform.reset_peak_memory()
