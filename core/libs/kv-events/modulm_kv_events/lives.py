"""Step part that measures how long blocks stay in the prefix cache (`--kv-cache-metrics`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from attrs import frozen

from modulm.contracts.step_part import PartPlanner, PlannerContext, StepPart, WaitingRequest
from modulm.errors import ConfigError
from modulm_kv_events.flags import KVCacheMetricsConfig

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BlockLivesPart", "BlockLivesPlanner"]

#: Most recent uses of a block that are kept, as in vLLM.
_USES = 4


class BlockLivesPart(StepPart):
    """Counts the lives of some blocks. Only the engine's half does anything."""

    name = "block_lives"
    api = 1

    def __init__(self, sample: float) -> None:
        self._sample = sample

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self | None:
        flags = config.group(KVCacheMetricsConfig)
        return cls(flags.kv_cache_metrics_sample) if flags.kv_cache_metrics else None

    def planner(self, context: PlannerContext) -> BlockLivesPlanner:
        return BlockLivesPlanner(context, self._sample)


@frozen(eq=False)
class _Life:
    """A block's life. born, uses: seconds of the monotonic clock."""

    born: float
    uses: deque[float]


class BlockLivesPlanner(PartPlanner):
    """Measures the blocks of the smallest size: the time from entering the prefix cache to
    eviction, the time unused before it, and the times between uses by requests.

    sample: fraction of the blocks to measure, chosen by their names. Raises ConfigError if the
    engine does not cache prefixes.
    """

    def __init__(
        self, context: PlannerContext, sample: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not context.prefixes.enabled:
            message = "there is no prefix cache: the model has none, or --no-enable-prefix-caching"
            raise ConfigError("kv_cache_metrics", message)
        self._rows, self._clock = context.rows, clock
        self._size = context.cache.sizes[0]
        self._most = int(sample * (1 << 32))
        pairs = zip(context.capacity.groups, context.cache.groups, strict=True)
        next(group for made, group in pairs if made.block_size == self._size).watch(self._changed)
        self._lives: dict[bytes, _Life] = {}
        self._ended: dict[str, list[float]] = {}

    def _changed(self, name: bytes, stored: bool) -> None:
        if stored:
            if int.from_bytes(name[-4:], "big") < self._most:
                self._lives[name] = _Life(self._clock(), deque(maxlen=_USES))
            return
        life = self._lives.pop(name, None)
        if life is None:
            return
        now, uses = self._clock(), list(life.uses)
        last = uses[-1] if uses else life.born
        gaps = [after - before for before, after in pairwise(uses)]
        for metric, seconds in (
            ("kv_block_lifetime_seconds", [now - life.born]),
            ("kv_block_idle_before_evict_seconds", [now - last]),
            ("kv_block_reuse_gap_seconds", gaps),
        ):
            self._ended.setdefault(metric, []).extend(seconds)

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        if not self._lives or not waiting.chains:
            return
        cached, now = int(self._rows.computed[row]) // self._size, self._clock()
        for name in waiting.chains[0].names[:cached]:
            life = self._lives.get(name)
            if life is not None:
                life.uses.append(now)

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        if not self._ended:
            return {}
        ended, self._ended = self._ended, {}
        return {"counts": ended}

    def forget(self, idle: bool) -> None:
        self._lives.clear()
