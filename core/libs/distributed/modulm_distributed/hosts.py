"""Platforms whose worker drives all devices of a machine."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["HostPlatform"]


@runtime_checkable
class HostPlatform(Protocol):
    """A platform whose worker drives all devices of its machine.

    Several machines have one worker each. All of them run the same plans, with a mesh of one rank;
    the platform splits their programs over the devices of all machines. Only the first worker's
    results are used.
    """

    def join_hosts(self, coordinator: str, hosts: int, host: int) -> None:
        """Connect this process with those of the other machines, before devices are used.

        coordinator: HOST:PORT, served by the first. hosts, host: their number, and the index of
        this one. Raises EngineError if they cannot be reached.
        """
