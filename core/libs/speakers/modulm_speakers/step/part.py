"""The step part of models that speak: completes the frames whose first codes a step sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.contracts.step_part import BuiltModel, PartPlanner, PlannerContext, StepPart
from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm_speakers.step.runner import SpeechRunner

__all__ = ["SpeechPart"]


class SpeechPart(StepPart):
    """In use for models that are a `SpeakingModel`."""

    name = "speech"
    api = 1

    def planner(self, context: PlannerContext) -> PartPlanner | None:
        from modulm_speakers.step.planner import SpeechPlanner

        return SpeechPlanner(context) if context.values else None

    def runner(self, built: BuiltModel) -> SpeechRunner | None:
        from modulm_speakers.model import SpeakingModel
        from modulm_speakers.step.runner import SpeechRunner

        if not isinstance(built.loaded.model, SpeakingModel):
            return None
        if built.mesh.world.size > 1:
            message = "not supported yet: models that speak on several ranks; use replicas"
            raise ConfigError("tensor_parallel_size", message)
        return SpeechRunner(built)
