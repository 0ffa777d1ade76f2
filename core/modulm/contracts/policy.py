"""Scheduling policy: which waiting request is admitted next, which running one is preempted.

Group `modulm.schedulers`: a policy by name (`--scheduling-policy`). A custom scheduler class
implements `Scheduler` and is given by path (`--scheduler-cls`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.executor import Plan, StepResult
    from modulm.contracts.requests import Finish, Request, StepEvents, StepStats
    from modulm.contracts.step_part import PartPlanner, PlannerContext, WaitingRequest

__all__ = ["API", "Candidate", "Policy", "Scheduler", "WaitingQueue"]

API = 1


class Candidate(Protocol):
    """A waiting or running request, as policies see it.

    arrival: seconds of `time.monotonic()`. priority: lower ones go first. prompt_len: tokens.
    tenant, weight: as in `Request`.
    """

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def arrival(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def prompt_len(self) -> int: ...


class WaitingQueue(Protocol):
    """The waiting requests, in the order in which they are admitted."""

    def __len__(self) -> int: ...

    def load(self, tenant: str) -> tuple[int, int]:
        """Return the number of requests and of tokens to hold against the limits of the queue when
        this tenant adds to it. May be called from other threads.
        """

    def push(self, entry: WaitingRequest) -> None:
        """Queue a request; one that was skipped or preempted returns to its former position."""

    def peek(self) -> WaitingRequest | None:
        """Return the next request without removing it; None: there is none to try."""

    def pop(self) -> WaitingRequest:
        """Remove the request that `peek` returned: it has a row, or this step skips it."""

    def remove(self, entry: WaitingRequest) -> None:
        """Remove a request that has ended."""


class Policy(ABC):
    """An order of requests. Ties are broken by arrival."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @abstractmethod
    def key(self, request: Candidate) -> float | tuple[float, ...]:
        """Return a sort key; the waiting request with the smallest one is admitted first."""

    @abstractmethod
    def victim(self, running: Sequence[Candidate]) -> int:
        """Return the index of the running request to preempt when blocks run out."""

    def displaced(self, waiting: Candidate, running: Sequence[Candidate]) -> int | None:
        """Return the index of the running request to preempt for the next waiting one, for which
        there is no row, or were too few blocks; None: it waits. Not called without a `planner`.
        """
        return None

    def queue(self) -> WaitingQueue | None:
        """Return the queue to use; None: a heap by `key`. Called once."""
        return None

    def planner(self, context: PlannerContext) -> PartPlanner | None:
        """Return a planner that follows rows and may limit their tokens, called after those of the
        step parts; None: running rows share the budget in order of admission. Called once.
        """
        return None


class Scheduler(ABC):
    """Chooses what each step runs. The built-in one is `BudgetScheduler` in
    `modulm.engine.scheduling.scheduler`.

    A class given by path is constructed as `(limits, capacity, policy, parts)`, where `parts` are
    the engine's step parts. Requests and events are those of `modulm.contracts.requests`. It is
    used by one thread. Plans are committed or failed in the order in which they were made; several
    may be in flight.
    """

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether any request waits or runs, or a plan's result is outstanding."""

    @property
    @abstractmethod
    def max_len(self) -> int:
        """Maximum tokens of a sequence, limited by the model and by the cache size."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Number of requests with a row."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests waiting for a row."""

    @abstractmethod
    def check_room(self, requests: int, tokens: int) -> None:
        """Raise QueueFull if the queue has no room for them. May be called from other threads."""

    def check_room_of(self, tenant: str, requests: int, tokens: int) -> None:
        """As `check_room`, for requests of one tenant, if each has a share of the queue."""
        self.check_room(requests, tokens)

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a `Request`. Raises QueueFull, or RequestError if it can never run."""

    @abstractmethod
    def abort(self, request: str) -> Finish | None:
        """End a request and free its blocks; None for an unknown id."""

    @abstractmethod
    def plan(self) -> Plan:
        """Plan the next step; an idle plan, which is not run, if there is nothing to do."""

    @abstractmethod
    def commit(self, plan: Plan, result: StepResult) -> StepEvents:
        """Process a step's result and return its events, in row order."""

    @abstractmethod
    def fail(self, plan: Plan, error: Exception) -> Sequence[Finish]:
        """End the requests of a step that raised `error`."""

    @abstractmethod
    def gauges(self) -> StepStats:
        """Return the current gauges, without statistics of a step."""

    @abstractmethod
    def forget_prefixes(self, root: bytes | None = None) -> None:
        """Empty the prefix cache and the slots of idle adapters; running requests continue.

        root: names the weights that blocks depend on from now on; None: unchanged.
        """
