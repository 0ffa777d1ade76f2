"""What collects statistics of an engine, such as Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from modulm.contracts.outputs import Finished
    from modulm.contracts.requests import StepStats

__all__ = ["Statistics"]


class Statistics(Protocol):
    """Collects statistics of an engine. Called on the thread that reads the engine's events."""

    def step(self, stats: StepStats) -> None:
        """Record a step."""

    def parts(self, counts: Mapping[str, Any]) -> None:
        """Record what step parts counted in a step; see `StepEvents.counts`."""

    def gaps(self, seconds: Sequence[float]) -> None:
        """Record inter-token latencies of all sequences that got a token in a step."""

    def finished(self, request: Finished) -> None:
        """Record a request that has ended."""
