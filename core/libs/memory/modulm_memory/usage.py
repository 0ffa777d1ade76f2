"""What running workers hold in memory, and what was to be expected of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from modulm.contracts.executor import WorkerHandle

__all__ = [
    "Expected", "device_bytes", "expected_bytes", "measure", "note_process", "process_bytes",
    "process_tree",
]  # fmt: skip

_PROC = Path("/proc")

#: Bytes of this process before its model was loaded.
_before_loading = 0


@frozen
class Expected:
    """What a worker's process was expected to hold. process_id: on its machine. bytes: None if the
    model cannot be estimated. on_device: whether its tensors are in the memory of a device.
    """

    process_id: int
    bytes: int | None
    on_device: bool


def process_bytes(process_id: int) -> int:
    """Return the memory of a process, in which pages that several processes share count
    proportionally; 0 on systems without /proc.
    """
    try:
        text = (_PROC / str(process_id) / "smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    sizes = (line.split()[1] for line in text.splitlines() if line.startswith("Pss:"))
    return int(next(sizes, "0")) << 10


def process_tree(process_ids: Iterable[int]) -> Iterator[int]:
    """Yield processes and those that they started."""
    waiting = list(process_ids)
    while waiting:
        process = waiting.pop()
        yield process
        with suppress(OSError):
            for task in (_PROC / str(process) / "task").iterdir():
                children = (task / "children").read_text(encoding="ascii").split()
                waiting += map(int, children)


def measure(process_ids: Iterable[int], *, tree: bool = True) -> int:
    """Return the memory of processes and, in a tree, of those that they started, in bytes."""
    processes = process_tree(process_ids) if tree else process_ids
    return sum(process_bytes(process) for process in processes)


def note_process() -> None:
    """Note the size of this process before its model is loaded."""
    global _before_loading
    _before_loading = process_bytes(os.getpid())


def device_bytes(worker: WorkerHandle) -> int | None:
    """Return the bytes of a worker's tensors in the memory of its device.

    A worker function: call it with `collective_rpc`. None if the platform does not measure them,
    since its tensors are in the process's memory.
    """
    return worker.platform.reset_peak_memory()


def expected_bytes(worker: WorkerHandle) -> Expected:
    """Estimate what a worker's process was to hold: the process before its model was loaded, and
    weights, caches and the largest step as `modulm fit` estimates them. A worker function.
    """
    from modulm.errors import ModulmError
    from modulm.plugins import manager
    from modulm_memory.estimate import estimate

    on_device = device_bytes(worker) is not None
    try:
        rank = estimate(worker.config, manager.current()).ranks[worker.rank]
    except ModulmError:
        return Expected(os.getpid(), None, on_device)
    held = rank.fixed + rank.step + rank.cache_bytes
    return Expected(os.getpid(), held + (0 if on_device else _before_loading), on_device)
