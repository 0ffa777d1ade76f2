"""What running workers hold in memory, and what they were expected to hold."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.executor import WorkerHandle

__all__ = [
    "PENDING", "device_bytes", "expected_bytes", "measure", "measure_each", "note_process",
]  # fmt: skip

log = logging.getLogger("modulm.engine")

#: Answer of `expected_bytes` while the estimate is made.
PENDING = -1

_PROC = Path("/proc")

#: Bytes of this process before its first model was loaded.
_before_loading: int | None = None
#: By worker: what its process was to hold, None for models that cannot be estimated.
_EXPECTED: WeakKeyDictionary[Any, Future[int | None]] = WeakKeyDictionary()


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
    if tree:
        return sum(measure_each(process_ids).values())
    return sum(map(_process_bytes, process_ids))


def measure_each(process_ids: Iterable[int]) -> dict[int, int]:
    """Return the memory in bytes of processes and of those that they started, by process id."""
    return {process: _process_bytes(process) for process in _process_tree(process_ids)}


def note_process() -> None:
    """Note the size of this process before its first model is loaded."""
    global _before_loading
    if _before_loading is None:
        _before_loading = _process_bytes(os.getpid())


def device_bytes(worker: WorkerHandle) -> int | None:
    """Return the bytes of a worker's tensors in the memory of its device.

    A worker function: call it with `collective_rpc`. None if the platform does not measure them,
    since its tensors are in the process's memory.
    """
    return worker.platform.reset_peak_memory()


def expected_bytes(worker: WorkerHandle) -> list[Any]:
    """Return [process id, bytes that the process was to hold, whether they are on a device].

    A worker function. The bytes are those of the process before its model was loaded (not on
    devices), and of weights, caches and the largest step as `modulm fit` estimates them. The first
    call begins to estimate them in a thread, while steps go on; until then they are `PENDING`. None
    for models that cannot be estimated.
    """
    on_device = device_bytes(worker) is not None
    if worker not in _EXPECTED:
        caches = _cache_bytes(worker)
        if caches is None:
            return [os.getpid(), PENDING, on_device]
        _EXPECTED[worker] = made = Future[int | None]()
        arguments = (made, worker.config, worker.rank, caches, on_device)
        threading.Thread(target=_estimate, args=arguments, name="memory-estimate").start()
    made = _EXPECTED[worker]
    return [os.getpid(), made.result() if made.done() else PENDING, on_device]


def _cache_bytes(worker: Any) -> int | None:
    """Return the bytes of a worker's caches; None while it sleeps."""
    loaded, sizing = worker.loaded, worker._sizing
    if loaded is None or sizing is None:
        return None
    counts = zip(loaded.groups, sizing.blocks, strict=True)
    held: int = sum(group.block_bytes * blocks for group, blocks in counts)
    return held


def _estimate(
    made: Future[int | None], config: EngineConfig, rank: int, caches: int, on_device: bool
) -> None:
    """Set what a worker was to hold. caches: bytes that the engine has chosen for them."""
    held: int | None = None
    try:
        from attrs import evolve

        from modulm.config.resolve import choose_platform
        from modulm.plugins import manager
        from modulm_memory.estimate import estimate

        plugins = manager.current()
        memory = choose_platform(config, plugins)[0].memory()
        whole = evolve(memory, free=memory.total)  # as before this model was loaded
        found = estimate(config, plugins, memory=whole).ranks[rank]
        held = found.fixed + found.step + caches + (0 if on_device else _before_loading or 0)
    except Exception as error:
        log.debug("Memory of %s is not estimated: %s", config.model.model, error)
    made.set_result(held)
