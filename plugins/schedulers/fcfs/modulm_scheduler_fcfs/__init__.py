"""First-come, first-served scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from modulm.contracts.policy import Candidate, Policy

__all__ = ["FirstCome"]


class FirstCome(Policy):
    """First come, first served."""

    name: ClassVar[str] = "fcfs"
    api: ClassVar[int | tuple[int, int]] = 1

    def key(self, request: Candidate) -> float:
        return request.arrival

    def victim(self, running: Sequence[Candidate]) -> int:
        """Preempt the latest arrival, so that the oldest request always progresses."""
        return max(range(len(running)), key=lambda i: (running[i].arrival, i))
