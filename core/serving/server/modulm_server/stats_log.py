"""Logs a line every ten seconds while the engine works: requests, throughput, cache usage."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modulm_server.engine.metrics import Metrics, ReplicaMetrics

__all__ = ["StatsLog"]

log = logging.getLogger("modulm_server.stats")


class StatsLog:
    """Logs the change of an engine's metrics since the last line; nothing while it is idle."""

    def __init__(self, metrics: Metrics | ReplicaMetrics) -> None:
        self._metrics = metrics
        self._seen = metrics.totals()
        self._when: float | None = None

    def look(self, now: float) -> None:
        """Log a line if anything changed. now: seconds of a monotonic clock."""
        last, before, self._when = self._seen, self._when, now
        self._seen = self._metrics.totals()
        stats = self._metrics.last
        if before is None or stats is None or self._seen == last:
            return
        seconds = now - before
        computed, generated, queried, hit = (
            new - old for new, old in zip(self._seen, last, strict=True)
        )
        log.info(
            "Running: %d reqs, waiting: %d reqs, prompt throughput: %.1f tokens/s, generation "
            "throughput: %.1f tokens/s, prefix cache hit rate: %.1f %%, KV cache usage: %.1f %%",
            stats.running,
            stats.waiting,
            max(computed - generated, 0) / seconds,
            generated / seconds,
            100 * hit / queried if queried else 0.0,
            100 * stats.usage,
        )
