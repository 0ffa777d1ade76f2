"""NUMA nodes: find the cores near each node's memory, and bind to them."""

from __future__ import annotations

import ctypes
import os
import platform as host
from collections.abc import Mapping
from pathlib import Path

from modulm.contracts.platform import Binding
from modulm.errors import ConfigError, UnsupportedError

__all__ = ["bind", "read_nodes", "settle"]

_NODES = Path("/sys/devices/system/node")
#: Numbers of the system call set_mempolicy(2), and its policy MPOL_BIND.
_CALLS = {"x86_64": 238, "aarch64": 237}
_BIND = 2


def read_nodes(folder: Path = _NODES) -> Mapping[int, frozenset[int]]:
    """Return the cores of each node; empty if the system does not report them."""
    return {
        int(node.name.removeprefix("node")): _cores((node / "cpulist").read_text())
        for node in folder.glob("node[0-9]*")
    }


def settle(
    binding: Binding, nodes: Mapping[int, frozenset[int]], allowed: frozenset[int]
) -> Binding:
    """Return the complete binding: cores that this process may use, and their nodes.

    Raises ConfigError for cores or nodes that do not exist.
    """
    if lacking := set(binding.nodes) - set(nodes):
        known = ", ".join(map(str, sorted(nodes))) or "none"
        raise ConfigError(
            "numa_bind_nodes", f"node {min(lacking)} does not exist; available nodes: {known}"
        )
    if lacking := set(binding.cpus) - allowed:
        problem = f"core {min(lacking)} is not available to this process"
        raise ConfigError("numa_bind_cpus", problem)
    chosen = binding.nodes
    if not chosen and not binding.cpus and nodes:
        chosen = (max(nodes, key=lambda node: (len(nodes[node] & allowed), -node)),)
    near = frozenset().union(*(nodes[node] for node in chosen)) if chosen else allowed
    cpus = frozenset(binding.cpus) or near & allowed
    if not cpus:
        raise ConfigError("numa_bind_nodes", "no core of the node is available to this process")
    chosen = chosen or tuple(sorted(node for node in nodes if nodes[node] & cpus))
    return Binding(cpus=tuple(sorted(cpus)), nodes=chosen)


def bind(binding: Binding) -> None:
    """Bind this thread, its future threads and their new memory. binding: from `settle`."""
    os.sched_setaffinity(0, binding.cpus)
    if not binding.nodes:
        return
    call = _CALLS.get(host.machine())
    if call is None:
        raise UnsupportedError(f"numa_bind: not supported yet on {host.machine()}")
    bits = max(binding.nodes) + 1
    mask = (ctypes.c_ulong * (bits // 64 + 1))()
    for node in binding.nodes:
        mask[node // 64] |= 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(call, _BIND, mask, ctypes.c_ulong(len(mask) * 64 + 1)):
        reason = os.strerror(ctypes.get_errno())
        raise UnsupportedError(f"numa_bind: the system refused to bind memory: {reason}")


def _cores(text: str) -> frozenset[int]:
    """Parse "0-3,8" to core numbers; nodes without cores have an empty list."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
