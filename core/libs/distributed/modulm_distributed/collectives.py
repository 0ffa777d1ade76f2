"""Collectives: how the ranks of a group exchange tensors (group `modulm.collectives`).

A platform lists the ones it prefers (`Platform.collectives`); the first that is installed and
accepts a group's ranks is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from modulm.contracts.platform import Platform
    from modulm.parallel import ProcessGroup

__all__ = ["API", "Collectives", "Members"]

API = 1


@frozen(eq=False)
class Members:
    """The ranks of a group, of which this process is number `rank`.

    name: of the group; unique, and the same on each rank. store: where the ranks meet. one_host:
    whether all run on this machine. seconds: how long to wait for other ranks. address: of this
    machine, for ranks on others.
    """

    name: str
    rank: int
    size: int
    store: Store
    one_host: bool = True
    seconds: float = 300.0
    address: str = ""


class Collectives(ABC):
    """A way to connect the ranks of a group."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Whether it sums with kernels of its own, which --disable-custom-all-reduce leaves out.
    custom_all_reduce: ClassVar[bool] = False

    @classmethod
    def rejects(cls, platform: Platform, members: Members) -> str | None:
        """Return why these ranks cannot be connected this way; None if they can."""
        return None

    @classmethod
    @abstractmethod
    def open(cls, platform: Platform, members: Members) -> ProcessGroup:
        """Connect this rank with the others, which make the same call. Raises EngineError."""
