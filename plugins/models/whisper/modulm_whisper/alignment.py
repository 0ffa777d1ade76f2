"""Word alignment: when in a sound its tokens are spoken, from cross-attention of alignment heads.

A request of the task `align` is a prompt with its answer. `pool_from` is the answer's first token;
`extra_args["frames"]` is the number of encoder outputs without padding. The result is [tokens,
frames] float32, one row per token of the answer.

Source: Radford et al., arXiv 2212.04356, and the program published with it: weights of the heads
that generation_config.json names, normalized over the tokens, smoothed by a median over frames, and
averaged. Front ends import this file, too, so torch is imported only by what workers call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modulm.contracts.pooler import Head, Layer, Pooler, PoolingInputs, RowPooler
from modulm.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.model import Model
    from modulm.contracts.pooling import PoolingRecipe
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["AlignmentPooler"]

_TASK = "align"
#: Default width of the median filter in frames.
_FILTER = 7


class AlignmentPooler(Pooler):
    """For decoders with cross-attention in `layers[i].cross`."""

    name = "whisper_alignment"
    api = 1

    def conversion(
        self,
        config: EngineConfig,
        names: Sequence[str],
        installed: Collection[str],
        recipe: PoolingRecipe,
    ) -> tuple[str, str] | None:
        return None

    def convert(
        self,
        driver: type[Model],
        purpose: str,
        table: Mapping[str, object],
        settings: Mapping[str, object],
    ) -> type[Model]:
        raise UnsupportedError(f"{self.name} does not convert models")

    def tasks(
        self, checkpoint: Checkpoint, model: Model, settings_: Mapping[str, object]
    ) -> tuple[str, ...]:
        return (*model.tasks, _TASK) if self._heads(checkpoint, model) else model.tasks

    def settings(
        self, checkpoint: Checkpoint, model: Model, settings_: Mapping[str, object]
    ) -> dict[str, object]:
        width = checkpoint.config.get("median_filter_width", _FILTER)
        return {"heads": self._heads(checkpoint, model), "filter": width}

    def rows(
        self, settings: Mapping[str, object], head: Head, layers: Sequence[Layer]
    ) -> RowPooler:
        from modulm_whisper.alignment_rows import AlignmentRows

        return AlignmentRows(settings)

    def inputs(
        self, info: EngineInfo, tokenizer: Tokenizer | None, template: str | None = None
    ) -> PoolingInputs:
        raise RequestError("the model does not pool text", "task")

    def _heads(self, checkpoint: Checkpoint, model: Any) -> list[list[int]]:
        """(layer, head) of the alignment heads.

        Empty if they belong to another model, as in distilled ones, or if ranks share the heads.
        """
        layers, heads = len(model.layers), model.config.decoder_attention_heads
        configured = checkpoint.generation_config.get("alignment_heads")
        if not isinstance(configured, list) or model.layers[0].cross.heads != heads:
            return []
        heads_ = [pair for pair in configured if _is_pair(pair)]
        there = all(0 <= layer < layers and 0 <= head < heads for layer, head in heads_)
        return heads_ if there and len(heads_) == len(configured) else []


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(isinstance(one, int) for one in value)
    )
