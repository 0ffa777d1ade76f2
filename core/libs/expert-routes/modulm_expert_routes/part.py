"""The step part of routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from modulm.contracts.decision import Decision
from modulm.contracts.step_part import BuiltModel, PlannerContext, StepPart
from modulm.errors import ConfigError
from modulm_expert_routes.flags import ExpertRoutesConfig

if TYPE_CHECKING:
    from modulm_expert_routes.planner import ReplayRefused, RoutesPlanner
    from modulm_expert_routes.runner import RoutesRunner

__all__ = ["ExpertRoutesPart"]


class ExpertRoutesPart(StepPart):
    """On with `--enable-return-routed-experts`. Otherwise it only refuses requests with experts."""

    name = "expert_routes"
    api = 1

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self:
        from modulm_kv_transfer.choice import connector_tables

        enabled = config.group(ExpertRoutesConfig).enable_return_routed_experts
        if enabled and plugins.configured("kv_connectors", connector_tables(config)) is not None:
            raise ConfigError(
                "enable_return_routed_experts",
                "KV connectors keep no routed experts: leave out --kv-transfer-config and "
                "--kv-offloading-size",
            )
        if enabled and "enable_audio_output" in config.changed():
            message = "sound comes from a second model: leave out --enable-audio-output"
            raise ConfigError("enable_return_routed_experts", message)
        return cls(enabled)

    def decision(self) -> Decision | None:
        if not self._enabled:
            return None
        return Decision("routed experts", (), "returned", "--enable-return-routed-experts")

    def planner(self, context: PlannerContext) -> RoutesPlanner | ReplayRefused:
        from modulm_expert_routes.planner import ReplayRefused, RoutesPlanner

        return RoutesPlanner(context) if self._enabled else ReplayRefused()

    def runner(self, built: BuiltModel) -> RoutesRunner | None:
        from modulm_expert_routes.runner import RoutesRunner

        return RoutesRunner(built) if self._enabled else None

    def pack_report(self, value: Any) -> Any:
        return value.wait()[0]
