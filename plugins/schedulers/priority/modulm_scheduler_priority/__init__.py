"""Priority scheduling: the smallest priority number first, ties by arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from modulm.contracts.policy import Candidate, Policy

__all__ = ["Priority"]


class Priority(Policy):
    """The smallest priority number first; ties are served in order of arrival."""

    name: ClassVar[str] = "priority"
    api: ClassVar[int | tuple[int, int]] = 1

    def key(self, request: Candidate) -> tuple[float, float]:
        return (request.priority, request.arrival)

    def victim(self, running: Sequence[Candidate]) -> int:
        """Preempt the largest priority number; among equals, the latest arrival."""
        return max(range(len(running)), key=lambda i: (running[i].priority, running[i].arrival, i))
