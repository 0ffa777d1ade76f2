"""Collectives: how the ranks of a group exchange tensors (group `modulm.collectives`).

A platform names those that it prefers (`Platform.collectives`); the first one that is installed
and does not reject a group of ranks connects it.
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

    name: of the group, the same on each rank and no other group's. store: where they find one
    another. one_host: whether all of them run on this machine. seconds: how long one waits for the
    others. address: of this machine, for the others.
    """

    name: str
    rank: int
    size: int
    store: Store
    one_host: bool = True
    seconds: float = 300.0
    address: str = ""


class Collectives(ABC):
    """Connects ranks."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    def rejects(cls, platform: Platform, members: Members) -> str | None:
        """Why these ranks cannot exchange tensors so; None: they can."""
        return None

    @classmethod
    @abstractmethod
    def open(cls, platform: Platform, members: Members) -> ProcessGroup:
        """Connect this rank with the others, which do the same. Raises EngineError."""
