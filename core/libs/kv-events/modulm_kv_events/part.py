"""Step part that watches the prefix cache; on if `--kv-events-config` enables events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from modulm.contracts.decision import Decision
from modulm.contracts.step_part import PlannerContext, StepPart
from modulm_kv_events.flags import Settings
from modulm_kv_events.settings import settings_of

if TYPE_CHECKING:
    from modulm_kv_events.planner import EventsPlanner
    from modulm_kv_events.publisher import Publisher

__all__ = ["KVEventsPart"]


class KVEventsPart(StepPart):
    """Publishes events of the prefix cache. Only the engine's half does anything."""

    name = "kv_events"
    api = 1

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._publisher: Publisher | None = None

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self | None:
        settings = settings_of(config)
        rank = config.parallel.data_parallel_rank_local
        return cls(settings, rank) if settings.active else None

    def decision(self) -> Decision:
        endpoint, replay = self._settings.of_replica(self._rank)
        repeated = "" if replay is None else f", repeated at {replay}"
        reason = f"set by --kv-events-config; published at {endpoint}{repeated}"
        return Decision("KV events", (), "zmq", reason)

    def planner(self, context: PlannerContext) -> EventsPlanner:
        from modulm_kv_events.planner import EventsPlanner
        from modulm_kv_events.publisher import Publisher

        planner = EventsPlanner(context)
        self._publisher = Publisher(self._settings, self._rank)
        planner.publish = self._publisher.publish
        return planner

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
