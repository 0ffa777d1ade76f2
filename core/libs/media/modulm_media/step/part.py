"""The step part of media: runs encoders before the model and puts their outputs into prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm.contracts.step_part import BuiltModel, PartPlanner, PlannerContext, StepPart
from modulm_media.step.values import EncodePlan, MediaRow

if TYPE_CHECKING:
    from modulm_media.step.runner import MediaRunner

__all__ = ["MediaPart"]


class MediaPart(StepPart):
    """In use for models with encoders, and if prompts may contain embeddings."""

    name = "media"
    api = 1

    def planner(self, context: PlannerContext) -> PartPlanner:
        from modulm_media.step.planner import EncoderPlanner, NoEncoders

        return EncoderPlanner(context) if context.values.get("tokens") else NoEncoders()

    def runner(self, built: BuiltModel) -> MediaRunner | None:
        from modulm_media.step.runner import MediaRunner

        model = built.loaded.model
        needed = model.media or model.axes > 1 or built.config.model.enable_prompt_embeds
        return MediaRunner(built) if needed else None

    def pack_plan(self, value: EncodePlan) -> Any:
        return [value.items, value.rows, value.drop]

    def unpack_plan(self, packed: Any) -> EncodePlan:
        items, rows, drop = packed
        return EncodePlan(tuple(map(tuple, items)), rows, tuple(drop))

    def pack_row(self, value: MediaRow) -> Any:
        from modulm_wire.packing import pack_media

        return [pack_media(value.items), value.positions, value.offset]

    def unpack_row(self, packed: Any) -> MediaRow:
        from modulm_wire.packing import unpack_media

        items, positions, offset = packed
        return MediaRow(unpack_media(items), positions, offset)

    def unpack_report(self, packed: Any) -> Any:
        return tuple(packed)
