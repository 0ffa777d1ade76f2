"""Scheduling policy: which waiting request is next, which running one gives way.

Group `modulm.schedulers`: a policy by name (`--scheduling-policy`); a whole scheduler class of
one's own is given by path (`--scheduler-cls`) and implements `Scheduler`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.executor import Plan, StepResult
    from modulm.contracts.requests import Finish, Request, StepEvents, StepStats

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
    def key(self, request: Candidate) -> float | tuple[float, ...]:
        """Sort key: the smallest waiting request is admitted first."""

    @abstractmethod
    def victim(self, running: Sequence[Candidate]) -> int:
        """Index of the running request that is preempted when blocks run out."""


class Scheduler(ABC):
    """Chooses what each step runs. The built-in one is `BudgetScheduler` in
    `modulm.engine.scheduling.scheduler`.

    A class given by path is constructed as `(limits, capacity, policy)`, and with `index`, the
    scheduler's half of a KV connector, where one is configured; see there. Requests and
    what becomes of them are the values of `modulm.contracts.requests`. One thread uses it. Plans
    are committed (or failed) in the order in which they were made; several may be under way.
    """

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether any request waits or runs, or a plan's result is outstanding."""

    @property
    @abstractmethod
    def max_len(self) -> int:
        """Most tokens that one sequence can have, by the model and by what the caches hold."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests that have a row."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that wait for one."""

    @abstractmethod
    def check_room(self, requests: int, tokens: int) -> None:
        """Raise QueueFull if that many more cannot wait. May be called from other threads."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a `Request`. Raises QueueFull, or RequestError if it can never run."""

    @abstractmethod
    def abort(self, request: str) -> Finish | None:
        """End a request now and free what it holds; None for an unknown name."""

    @abstractmethod
    def plan(self) -> Plan:
        """The next step; an idle plan when there is nothing to do, which is not run."""

    @abstractmethod
    def commit(self, plan: Plan, result: StepResult) -> StepEvents:
        """Take a step's result: its events, in row order."""

    @abstractmethod
    def fail(self, plan: Plan, error: Exception) -> Sequence[Finish]:
        """The step raised `error`: the end of each request it ran."""

    @abstractmethod
    def gauges(self) -> StepStats:
        """The numbers of this moment, with no step in them."""

    @abstractmethod
    def forget_prefixes(self, root: bytes | None = None) -> None:
        """Empty the prefix cache and the slots of idle adapters; running requests go on.

        root: names the weights that blocks depend on from now on; None: those from before.
        """
