"""CPU and memory binding of workers."""

from __future__ import annotations

from modulm.contracts.config.device import DeviceConfig
from modulm.contracts.config.parallel import ParallelConfig
from modulm.contracts.platform import Binding
from modulm.errors import ConfigError

__all__ = ["binding_of", "share_of"]


def share_of(parallel: ParallelConfig, rank: int) -> tuple[int, int]:
    """Return which share of its machine the worker `rank` gets, and the number of shares."""
    parts = parallel.ranks * (parallel.data_parallel_size_local or 1)
    return parallel.data_parallel_rank_local * parallel.ranks + rank, parts


def binding_of(device: DeviceConfig, rank: int = 0, ranks: int = 1) -> Binding | None:
    """Return the cores and nodes that a worker is bound to, or None for no binding.

    Raises ConfigError unless there is an entry for each worker, and for an invalid list of cores.
    """
    nodes, cpus = device.numa_bind_nodes, device.numa_bind_cpus
    if not (device.numa_bind or nodes or cpus):
        return None
    for name, entries in (("numa_bind_nodes", nodes), ("numa_bind_cpus", cpus)):
        if entries and len(entries) != ranks:
            raise ConfigError(name, f"{len(entries)} entries for {ranks} worker(s)")
    return Binding(cpus=_numbers(cpus[rank]) if cpus else (), nodes=(nodes[rank],) if nodes else ())


def _numbers(text: str) -> tuple[int, ...]:
    """Parse "0-3,8" to numbers."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            numbers.update(range(int(first), int(last or first) + 1))
        except ValueError as error:
            problem = f"{text!r} is not a list of cores such as 0-3,8"
            raise ConfigError("numa_bind_cpus", problem) from error
    return tuple(sorted(numbers))
