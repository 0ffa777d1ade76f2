"""Which part of the machine a worker is to keep to."""

from __future__ import annotations

from modulm.contracts.config.device import DeviceConfig
from modulm.contracts.config.parallel import ParallelConfig
from modulm.contracts.platform import Binding
from modulm.errors import ConfigError

__all__ = ["binding_of", "share_of"]


def share_of(parallel: ParallelConfig, rank: int) -> tuple[int, int]:
    """Which part of its machine the worker `rank` has, and how many parts there are."""
    parts = parallel.ranks * (parallel.data_parallel_size_local or 1)
    return parallel.data_parallel_rank_local * parallel.ranks + rank, parts


def binding_of(device: DeviceConfig, rank: int = 0, ranks: int = 1) -> Binding | None:
    """Where a worker is to stay, or None for anywhere.

    Raises ConfigError unless each worker has an entry, and for a list of cores that is none.
    """
    nodes, cpus = device.numa_bind_nodes, device.numa_bind_cpus
    if not (device.numa_bind or nodes or cpus):
        return None
    for name, given in (("numa_bind_nodes", nodes), ("numa_bind_cpus", cpus)):
        if given and len(given) != ranks:
            raise ConfigError(name, f"{len(given)} entries for {ranks} worker(s)")
    return Binding(cpus=_numbers(cpus[rank]) if cpus else (), nodes=(nodes[rank],) if nodes else ())


def _numbers(text: str) -> tuple[int, ...]:
    """ "0-3,8" as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            found.update(range(int(first), int(last or first) + 1))
        except ValueError as error:
            problem = f"{text!r} is no list of cores such as 0-3,8"
            raise ConfigError("numa_bind_cpus", problem) from error
    return tuple(sorted(found))
