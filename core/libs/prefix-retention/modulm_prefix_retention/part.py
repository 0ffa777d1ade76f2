"""Step part that holds cached prefixes; only the engine's half does anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from modulm.contracts.decision import Decision
from modulm.contracts.step_part import PlannerContext, StepPart
from modulm_prefix_retention.flags import PrefixRetentionConfig

if TYPE_CHECKING:
    from modulm_prefix_retention.planner import RetentionPlanner

__all__ = ["RetentionPart"]


class RetentionPart(StepPart):
    """On unless `--prefix-retention 0`, or without a prefix cache."""

    name = "prefix_retention"
    api = 1

    def __init__(self, share: float, per_key: float) -> None:
        self._share, self._per_key = share, per_key

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self | None:
        flags = config.group(PrefixRetentionConfig)
        if not (flags.prefix_retention and flags.prefix_retention_per_key):
            return None
        if not config.cache.enable_prefix_caching:
            return None
        return cls(flags.prefix_retention, flags.prefix_retention_per_key)

    def decision(self) -> Decision:
        reason = f"at most {self._share:g} of the KV cache, {self._per_key:g} of that for one key"
        return Decision("prefix retention", (), "on", reason)

    def planner(self, context: PlannerContext) -> RetentionPlanner | None:
        from modulm_prefix_retention.planner import RetentionPlanner

        if not context.prefixes.enabled:
            return None
        return RetentionPlanner(context, self._share, self._per_key)
