"""Draft with a checkpoint's multi-token-prediction layer (arXiv 2412.19437).

The first layer runs once per drafted token, even if a checkpoint has several.
"""

from __future__ import annotations

from typing import ClassVar, Self

from attrs import frozen

from modulm.errors import ConfigError
from modulm_speculation import Options, Target
from modulm_speculation.chain import HiddenChain
from modulm_speculation.draft_model import DraftWeights, load_draft
from modulm_speculator_mtp.predictor import Predictor, predictor_of

__all__ = ["Mtp", "MtpOptions"]


@frozen
class MtpOptions(Options):
    """model: folder or hub id of the layer's checkpoint, if it is not the model's own. revision,
    quantization: of that checkpoint.
    """

    num_speculative_tokens: int = 1
    model: str = ""
    revision: str | None = None
    quantization: str | None = None
    draft_tensor_parallel_size: int = 1

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.draft_tensor_parallel_size != 1:
            raise ConfigError(
                "draft_tensor_parallel_size", "only 1: MTP layers are not split over ranks"
            )


class Mtp(HiddenChain):
    """Drafts with the checkpoint's own layer after each step."""

    name: ClassVar[str] = "mtp"
    Config: ClassVar[type] = MtpOptions

    @classmethod
    def open(cls, config: Options, target: Target) -> Self:
        if not isinstance(config, MtpOptions):
            raise ConfigError("method", "mtp has options of its own")
        of = target.config.model
        draft = load_draft(
            target,
            DraftWeights(
                model=config.model or of.model,
                revision=config.revision or (None if config.model else of.revision),
                quantization=config.quantization or of.quantization,
                driver=predictor_of(type(target.model)),
            ),
        )
        if isinstance(draft.model, Predictor):
            draft.model.target = target
        return cls(config, draft)
