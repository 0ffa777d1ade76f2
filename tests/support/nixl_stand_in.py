"""A stand-in for the package nixl: the methods of its documented Python API that modulm calls.

It checks arguments as NIXL does: descriptors lie in registered memory of an agent that is known,
and a transfer is pending until it is looked at.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["nixl_agent", "nixl_agent_config", "reads"]

#: Bytes of each transfer that ended.
reads: list[int] = []
_AGENTS: dict[str, nixl_agent] = {}


class nixl_agent_config:
    """NIXL's names: backends."""

    def __init__(self, backends: list[str] | None = None) -> None:
        self.backends = ["UCX"] if backends is None else backends


class _Registered:
    def __init__(self, regions: list[tuple[int, int]]) -> None:
        self.regions = regions


class _Transfer:
    def __init__(self, pairs: list[tuple[int, int, int]], owner: nixl_agent) -> None:
        self.pairs, self.owner, self.state = pairs, owner, "NEW"


class _Descriptors:
    def __init__(self, listed: list[tuple[int, int, int]]) -> None:
        self.listed = listed


class nixl_agent:
    """An agent of this process."""

    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config | None = None) -> None:
        config = nixl_conf or nixl_agent_config()
        if not set(config.backends) <= {"UCX", "POSIX"}:
            raise KeyError(f"no such backend: {config.backends}")
        self.name, self.memory = agent_name, list[_Registered]()
        self.peers: set[str] = set()
        _AGENTS[agent_name] = self

    def register_memory(self, reg_list: Sequence[torch.Tensor]) -> _Registered:
        if not all(tensor.is_contiguous() for tensor in reg_list):
            raise ValueError("tensors must be contiguous")
        regions = [(t.data_ptr(), t.numel() * t.element_size()) for t in reg_list]
        self.memory.append(_Registered(regions))
        return self.memory[-1]

    def deregister_memory(self, dereg_list: _Registered) -> None:
        self.memory.remove(dereg_list)

    def get_agent_metadata(self) -> bytes:
        return pickle.dumps((self.name, [r for m in self.memory for r in m.regions]))

    def add_remote_agent(self, metadata: bytes) -> str:
        name, _ = pickle.loads(metadata)
        if name not in _AGENTS:
            raise RuntimeError("nixlRemoteDisconnectError")
        self.peers.add(name)
        return str(name)

    def remove_remote_agent(self, agent: str) -> None:
        self.peers.remove(agent)

    def get_xfer_descs(
        self, descs: list[tuple[int, int, int]], mem_type: str | None = None
    ) -> _Descriptors:
        if mem_type != "DRAM" or not all(len(each) == 3 for each in descs):
            raise ValueError("3-tuples and a memory type are needed")
        return _Descriptors(list(descs))

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str
    ) -> _Transfer:
        if operation != "READ" or remote_agent not in self.peers:
            raise RuntimeError("nixlInvalidParamError")
        owner = _AGENTS[remote_agent]
        for agent, descriptors in ((self, local_descs), (owner, remote_descs)):
            for address, size, _ in descriptors.listed:
                if not agent.has(address, size):
                    raise RuntimeError("nixlNotFoundError: memory is not registered")
        pairs = [
            (here[0], there[0], here[1])
            for here, there in zip(local_descs.listed, remote_descs.listed, strict=True)
        ]
        return _Transfer(pairs, owner)

    def has(self, address: int, size: int) -> bool:
        """Whether memory is registered."""
        regions = [region for memory in self.memory for region in memory.regions]
        return any(at <= address and address + size <= at + most for at, most in regions)

    def transfer(self, handle: _Transfer, notif_msg: bytes = b"") -> str:
        handle.state = "PROC"
        return handle.state

    def check_xfer_state(self, handle: _Transfer) -> str:
        if handle.state == "PROC":
            handle.state = "DONE" if handle.owner.memory else "ERR"
            for here, there, size in handle.pairs if handle.state == "DONE" else ():
                ctypes.memmove(here, there, size)
                reads.append(size)
        return handle.state

    def release_xfer_handle(self, handle: _Transfer) -> None:
        handle.state = "RELEASED"
