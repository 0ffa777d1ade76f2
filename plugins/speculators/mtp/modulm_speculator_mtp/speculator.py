"""Draft with a checkpoint's multi-token-prediction layer (arXiv 2412.19437).

The first layer runs once per drafted token, even if a checkpoint has several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from attrs import evolve, frozen

from modulm.errors import ConfigError, ModulmError
from modulm.loading import open_checkpoint
from modulm.loading.checkpoint import open_loader
from modulm.nn import read_config
from modulm.plugins import manager
from modulm_speculation import Options, Target
from modulm_speculation.chain import HiddenChain
from modulm_speculation.draft_model import DraftWeights, load_draft
from modulm_speculator_mtp.predictor import Predictor, predictor_of

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model

__all__ = ["Mtp", "MtpOptions"]


@frozen
class MtpOptions(Options):
    """model: folder or hub id of the layer's checkpoint, if it is not the model's own. revision,
    quantization: of that checkpoint. draft_tensor_parallel_size: as
    many as the model's. trees: draft the second choice for each token, too.
    """

    num_speculative_tokens: int = 1
    model: str = ""
    revision: str | None = None
    quantization: str | None = None
    draft_tensor_parallel_size: int | None = None
    trees: bool = False


class Mtp(HiddenChain):
    """Drafts with the checkpoint's own layer after each step."""

    name: ClassVar[str] = "mtp"
    Config: ClassVar[type] = MtpOptions
    preference: ClassVar[int] = 20

    @classmethod
    def automatic(
        cls, config: EngineConfig, checkpoint: Checkpoint, family: type[Model]
    ) -> Mapping[str, Any] | str:
        parallel = config.parallel
        if parallel.ranks > parallel.tensor_parallel_size or parallel.shared_experts:
            return "MTP layers do not run with pipeline stages or experts shared by replicas"
        if parallel.decode_context_parallel_size > 1:
            return "MTP layers do not run with decode context parallelism"
        file = str(checkpoint.config_file)
        try:
            settings = read_config(checkpoint.config, family.config_type, file)
            layer = family.mtp(settings)
            if layer is None:
                return f"{family.__name__} has no MTP layer"
            stored = open_loader(config, checkpoint.path, manager.current()).driver.index()
        except ModulmError as error:
            return str(error)
        # The model itself ignores the names of draft layers, but renames them as others.
        names = evolve(family.weights(settings), ignore=())
        if not any((names.name(each) or "").startswith(f"{layer.project}.") for each in stored):
            return f"the checkpoint has no weights of {layer.project}"
        return {}

    @property
    def width(self) -> int:
        predictor: Any = self.draft.model
        width: int = predictor.of.hidden
        return width

    @classmethod
    def open(cls, config: Options, target: Target) -> Self:
        if not isinstance(config, MtpOptions):
            raise ConfigError("method", "mtp has options of its own")
        of = target.config.model
        architectures = open_checkpoint(target.config, manager.current()).architectures
        draft = load_draft(
            target,
            DraftWeights(
                model=config.model or of.model,
                revision=config.revision or (None if config.model else of.revision),
                quantization=config.quantization or of.quantization,
                ranks=config.draft_tensor_parallel_size,
                driver=predictor_of(type(target.model), architectures),
            ),
        )
        if isinstance(draft.model, Predictor):
            draft.model.target = target
        return cls(config, draft)
