"""The step part of media: runs encoders before the model and puts their outputs into prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from modulm.contracts.decision import Decision
from modulm.contracts.step_part import BuiltModel, PartPlanner, PlannerContext, StepPart
from modulm_kv_transfer.flags import ECTransferConfig
from modulm_media.step.values import EncodePlan, MediaRow

if TYPE_CHECKING:
    from modulm_kv_transfer.encoder_outputs import EncoderOutputs, EncoderTransfer
    from modulm_media.step.runner import MediaRunner

__all__ = ["MediaPart"]


class MediaPart(StepPart):
    """In use for models with encoders, and if prompts may contain embeddings."""

    name = "media"
    api = 1

    def __init__(
        self,
        outputs: EncoderOutputs | None = None,
        transfer: EncoderTransfer | None = None,
        decision: Decision | None = None,
    ) -> None:
        """outputs, transfer: the store of encoder outputs, and what it is for."""
        self._outputs, self._transfer, self._decision = outputs, transfer, decision

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self:
        table = config.group(ECTransferConfig).ec_transfer_config
        if not table:
            return cls()
        from modulm_kv_transfer.encoder_choice import open_encoder_outputs

        outputs, transfer = open_encoder_outputs(config, plugins) or (None, None)
        reason = f"set by --ec-transfer-config; {table['ec_role']}"
        decision = Decision("encoder outputs", (), table["ec_connector"], reason)
        return cls(outputs, transfer, decision)

    def decision(self) -> Decision | None:
        return self._decision

    def planner(self, context: PlannerContext) -> PartPlanner:
        from modulm_media.step.planner import EncoderPlanner, FetchingPlanner, NoEncoders

        if not context.values.get("tokens"):
            return NoEncoders()
        if self._outputs is not None and self._transfer is not None:
            self._outputs.start()
            if self._transfer.consumes and self._outputs.remote:
                return FetchingPlanner(context, self._outputs)
        return EncoderPlanner(context)

    def runner(self, built: BuiltModel) -> MediaRunner | None:
        from modulm_media.step.runner import MediaRunner

        model = built.loaded.model
        needed = model.media or model.axes > 1 or built.config.model.enable_prompt_embeds
        return MediaRunner(built, self._outputs, self._transfer) if needed else None

    def close(self) -> None:
        if self._outputs is not None:
            self._outputs.close()

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
