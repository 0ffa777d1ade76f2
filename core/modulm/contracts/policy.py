"""Scheduling policy: which waiting request is next, which running one gives way.

Group `modulm.schedulers`: a policy by name (`--scheduling-policy`); a whole scheduler class of
one's own is given by path (`--scheduler-cls`) and implements `Scheduler`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.executor import Plan, StepResult

__all__ = ["API", "Candidate", "Policy", "Scheduler"]

API = 1


class Candidate(Protocol):
    """What a policy may look at: a request that waits or runs."""

    @property
    def arrival(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def prompt_len(self) -> int: ...


class Policy(ABC):
    """An order over requests. Ties are broken by arrival."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @abstractmethod
    def key(self, request: Candidate) -> Any:
        """Sort key: the smallest waiting request is admitted first."""

    @abstractmethod
    def victim(self, running: Sequence[Candidate]) -> int:
        """Index of the running request that is preempted when blocks run out."""


class Scheduler(ABC):
    """Chooses what each step runs. The built-in one is `modulm.engine.scheduler`."""

    @abstractmethod
    def add(self, request: Any) -> None:
        """Queue a request. Raises QueueFull when the bound is reached."""

    @abstractmethod
    def abort(self, request: str) -> None:
        """End a request now and free what it holds; unknown names are ignored."""

    @abstractmethod
    def plan(self) -> Plan:
        """The next step; a plan without rows when there is nothing to do."""

    @abstractmethod
    def commit(self, plan: Plan, result: StepResult) -> Sequence[Any]:
        """Take a step's result and return its events, in row order."""
