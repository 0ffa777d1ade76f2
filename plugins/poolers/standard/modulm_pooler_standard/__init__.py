"""Pooling as in sentence-transformers and vLLM: embeddings, classification, rewards, scores of
pairs.

Modules that need torch are imported when a worker uses them: front ends may run without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modulm.contracts.pooler import Head, Layer, Pooler, PoolingInputs, RowPooler

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.model import Model
    from modulm.contracts.pooling import PoolingRecipe
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["StandardPooler"]


class StandardPooler(Pooler):
    """Converts decoders to pooling models, pools with one or several types, and scores pairs with
    the model or by similarity.
    """

    name = "standard"
    api = 1

    def conversion(
        self,
        config: EngineConfig,
        names: Sequence[str],
        installed: Collection[str],
        recipe: PoolingRecipe,
    ) -> tuple[str, str] | None:
        from modulm_pooler_standard.tasks import conversion

        return conversion(config, names, installed, recipe)

    def convert(
        self,
        driver: type[Model],
        purpose: str,
        table: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> type[Model]:
        from modulm_pooler_standard.tasks import convert

        return convert(driver, purpose, table, settings)

    def tasks(
        self, checkpoint: Checkpoint, model: Model, settings: Mapping[str, Any]
    ) -> tuple[str, ...]:
        from modulm_pooler_standard.tasks import pooling_tasks

        return pooling_tasks(checkpoint, model, settings)

    def settings(
        self, checkpoint: Checkpoint, model: Model, settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        from modulm_pooler_standard.tasks import pooling_table

        return pooling_table(checkpoint, model, settings)

    def rows(self, settings: Mapping[str, Any], head: Head, layers: Sequence[Layer]) -> RowPooler:
        from modulm_pooler_standard.rows import PoolerConfig, StandardRows

        return StandardRows(PoolerConfig.from_table(settings), head, layers)

    def inputs(
        self, info: EngineInfo, tokenizer: Tokenizer | None, template: str | None = None
    ) -> PoolingInputs:
        from modulm_pooler_standard.inputs import StandardInputs

        return StandardInputs(info, tokenizer, template)
