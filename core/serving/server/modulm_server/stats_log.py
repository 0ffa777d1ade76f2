"""Statistics at intervals: what changed in an engine's metrics, passed to the stat loggers."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Self

from modulm.errors import ConfigError
from modulm_server.stat_logger import IntervalStats, StatLogger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.config import EngineConfig
    from modulm.plugins import PluginManager
    from modulm_server.engine.metrics import Metrics, ReplicaMetrics

__all__ = ["LogLine", "Statistics", "open_loggers"]

log = logging.getLogger("modulm_server.stats")


class LogLine(StatLogger):
    """Writes a line into the log: requests, throughput, cache usage."""

    name = "log"
    api = 1

    @classmethod
    def of(cls, config: EngineConfig) -> Self | None:
        """Every server writes the line."""
        return cls()

    def record(self, stats: IntervalStats) -> None:
        """Write the line."""
        log.info(
            "Running: %d reqs, waiting: %d reqs, prompt throughput: %.1f tokens/s, generation "
            "throughput: %.1f tokens/s, prefix cache hit rate: %.1f %%, KV cache usage: %.1f %%",
            stats.running,
            stats.waiting,
            stats.prompt_tokens / stats.seconds,
            stats.generated_tokens / stats.seconds,
            100 * stats.hit_rate,
            100 * stats.cache_usage,
        )


class _Thread:
    """Runs one logger on a thread that is started when it is needed."""

    def __init__(self, logger: StatLogger, origin: str) -> None:
        self.logger = logger
        self._origin = origin
        self._worker: threading.Thread | None = None
        self._failed = self._warned = False

    def record(self, stats: IntervalStats) -> None:
        """Pass statistics on, unless the logger failed or is still busy."""
        if self._failed:
            return
        if self._worker is not None and self._worker.is_alive():
            if not self._warned:
                log.warning("%s takes longer than an interval", self._origin)
                self._warned = True
            return
        self._worker = threading.Thread(
            target=self._call, args=("record", stats), daemon=True, name="stat-logger"
        )
        self._worker.start()

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self.logger, method)(*arguments)
        except (Exception, SystemExit) as error:
            self._failed = True
            log.error(
                "%s is not called again: %s raised %s: %s",
                *(self._origin, method, type(error).__name__, error),
            )

    def close(self, patience: float) -> None:
        """Close the logger on its thread. patience: seconds to wait for it."""
        last = self._worker
        if last is not None:
            last.join(patience)
            if last.is_alive():
                return
        ending = threading.Thread(target=self._call, args=("close",), daemon=True)
        ending.start()
        ending.join(patience)


def open_loggers(config: EngineConfig, plugins: PluginManager) -> list[tuple[StatLogger, str]]:
    """Create the installed stat loggers, each with its plugin's name.

    One that cannot be imported or created is logged and left out. Raises ConfigError, and
    PluginConflict for a name that two packages provide.
    """
    loggers: list[tuple[StatLogger, str]] = []
    for name in dict.fromkeys(declared.name for declared in plugins.names("stat_loggers")):
        declared = plugins.find("stat_loggers", name)
        try:
            logger = plugins.load_declared(declared).of(config)
            if logger is not None and not isinstance(logger, StatLogger):
                raise TypeError(f"of() gave {logger!r}, which is no StatLogger")
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            log.error("%s is not used: %s: %s", declared, type(error).__name__, error)
            continue
        if logger is not None:
            loggers.append((logger, str(declared)))
    return loggers


class Statistics:
    """Passes the change of an engine's metrics to loggers; nothing while it is idle."""

    def __init__(
        self, metrics: Metrics | ReplicaMetrics, loggers: Sequence[tuple[StatLogger, str]]
    ) -> None:
        self._metrics = metrics
        self._loggers = [_Thread(logger, origin) for logger, origin in loggers]
        self._seen = metrics.totals()
        self._when: float | None = None

    def look(self, now: float) -> None:
        """Pass statistics on if anything changed. now: seconds of a monotonic clock."""
        last, before, self._when = self._seen, self._when, now
        self._seen = self._metrics.totals()
        stats = self._metrics.last
        if before is None or stats is None or self._seen == last:
            return
        computed, generated, queried, hit = (
            int(new - old) for new, old in zip(self._seen, last, strict=True)
        )
        interval = IntervalStats(
            seconds=max(now - before, 1e-3),
            prompt_tokens=max(computed - generated, 0),
            generated_tokens=generated,
            queried_tokens=queried,
            hit_tokens=hit,
            running=stats.running,
            waiting=stats.waiting,
            cache_usage=stats.usage,
        )
        for logger in self._loggers:
            logger.record(interval)

    def close(self, patience: float = 1.0) -> None:
        """Close all loggers. patience: seconds to wait for each."""
        for logger in self._loggers:
            logger.close(patience)
