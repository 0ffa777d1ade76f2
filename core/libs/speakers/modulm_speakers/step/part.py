"""The step part of models that speak: completes the frames whose first codes a step sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.contracts.step_part import BuiltModel, PartPlanner, PlannerContext, StepPart
from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm_speakers.step.runner import SpeechRunner

__all__ = ["SpeechPart"]

#: Flags that name a drafter. Drafters and the part for two models cannot both read single layers.
_DRAFTERS = ("speculative_config", "spec_method", "spec_model")


class SpeechPart(StepPart):
    """In use for models that are a `SpeakingModel`."""

    name = "speech"
    api = 1

    def planner(self, context: PlannerContext) -> PartPlanner | None:
        from modulm_speakers.step.planner import SpeechPlanner
        from modulm_speakers.step.talker_planner import TalkerPlanner

        if not context.values:
            return None
        return TalkerPlanner(context) if "texts" in context.values else SpeechPlanner(context)

    def runner(self, built: BuiltModel) -> SpeechRunner | None:
        from modulm_speakers.model import SpeakingModel
        from modulm_speakers.step.runner import SpeechRunner
        from modulm_speakers.step.talker_runner import TalkerRunner

        model = built.loaded.model
        if not (isinstance(model, SpeakingModel) and model.speaks):
            return None
        if built.mesh.world.size > 1:
            message = "not supported yet: models that speak on several ranks; use replicas"
            raise ConfigError("tensor_parallel_size", message)
        named = next(filter(built.config.value, _DRAFTERS), None)
        if model.beside_text is None:
            if named is not None:
                raise ConfigError(named, f"no tokens are drafted for this model: {model.no_drafts}")
            return SpeechRunner(built)
        if named is not None:
            message = "not supported yet: with a named drafter; --speculative auto works"
            raise ConfigError("enable_audio_output", message)
        return TalkerRunner(built)
