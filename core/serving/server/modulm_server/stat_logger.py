"""Stat loggers: statistics of an engine at intervals (group `modulm.stat_loggers`).

All installed ones whose `of` returns an object get statistics about every ten seconds while the
engine works, unless `--disable-log-stats` is set. modulm's own writes the line in the log.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from attrs import frozen

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["API", "IntervalStats", "StatLogger"]

API = 1


@frozen
class IntervalStats:
    """What the engines of a server did in an interval, and their state at its end.

    seconds: length of the interval. prompt_tokens, generated_tokens: computed in it.
    queried_tokens, hit_tokens: looked up and found in the prefix cache. running, waiting:
    sequences. cache_usage: fraction of KV cache blocks in use, 0 to 1.
    """

    seconds: float
    prompt_tokens: int = 0
    generated_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Fraction of the looked up tokens that were found; 0 if none was looked up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class StatLogger(ABC):
    """Receives the statistics of intervals, on a thread of its own.

    While a call has not returned, the next intervals are left out for this logger. One that raises
    is logged with its package and not called again.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def of(cls, config: EngineConfig) -> Self | None:
        """Create the logger from the configuration, or return None if it is off.

        Raises ConfigError for invalid options.
        """

    @abstractmethod
    def record(self, stats: IntervalStats) -> None:
        """Take the statistics of an interval. Any count may be 0."""

    def close(self) -> None:
        """End: called once when the server stops, after the last `record` has returned."""
