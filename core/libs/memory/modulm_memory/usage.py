"""What running workers hold in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modulm.contracts.executor import WorkerHandle

__all__ = ["device_bytes", "measure"]

_PROC = Path("/proc")


def _process_bytes(process_id: int) -> int:
    """Return the memory of a process, in which pages that several processes share count
    proportionally; 0 on systems without /proc.
    """
    try:
        text = (_PROC / str(process_id) / "smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    sizes = (line.split()[1] for line in text.splitlines() if line.startswith("Pss:"))
    return int(next(sizes, "0")) << 10


def _process_tree(process_ids: Iterable[int]) -> Iterator[int]:
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
    processes = _process_tree(process_ids) if tree else process_ids
    return sum(_process_bytes(process) for process in processes)


def device_bytes(worker: WorkerHandle) -> int | None:
    """Return the bytes of a worker's tensors in the memory of its device.

    A worker function: call it with `collective_rpc`. None if the platform does not measure them,
    since its tensors are in the process's memory.
    """
    return worker.platform.reset_peak_memory()
