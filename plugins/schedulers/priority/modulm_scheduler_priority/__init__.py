"""The smallest priority number first; among equals, first come, first served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from modulm.contracts.policy import Candidate, Policy

__all__ = ["Priority"]


class Priority(Policy):
    """The smallest priority number first; among equals, first come, first served."""

    name: ClassVar[str] = "priority"
    api: ClassVar[int | tuple[int, int]] = 1

    def key(self, request: Candidate) -> tuple[float, float]:
        return (request.priority, request.arrival)

    def victim(self, running: Sequence[Candidate]) -> int:
        """The least important one gives way, the latest arrival among equals."""
        return max(range(len(running)), key=lambda i: (running[i].priority, running[i].arrival, i))
