"""Retrieval models with one vector per token of a page or question (arXiv 2407.01449)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from attrs import evolve
from torch import Tensor
from torch.nn import Identity

from modulm.contracts.model import Batch
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_towers.multimodal import MultimodalModel

__all__ = ["TokenVectors", "vlm_table"]


def vlm_table(table: Mapping[str, Any], architecture: str, file: str) -> tuple[dict[str, Any], int]:
    """(`vlm_config` of config.json, adapted to `architecture` without a stored head; vector width).

    Raises CheckpointError.
    """
    inner, width = table.get("vlm_config"), table.get("embedding_dim", 128)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{file}: vlm_config: must be a table")
    if type(width) is not int or width < 1:
        raise CheckpointError(f"{file}: embedding_dim: {width!r}")
    return {**inner, "architectures": [architecture], "tie_word_embeddings": True}, width


class TokenVectors(MultimodalModel):
    """Mixin before the class of a model that reads images.

    `config.width` is the width of the vectors, which have length 1. None: the text model's, without
    a layer after it.
    """

    media = ("image",)
    tasks = ("token_embed",)
    #: The checkpoint's name of the layer after the text model.
    projection: ClassVar[str] = "embedding_proj_layer"

    def make_encoders(self, config: Any, b: Builder) -> None:
        super().make_encoders(config, b)  # type: ignore[safe-super]
        hidden, name = config.hidden_size, self.projection
        self.out = (
            Identity()
            if config.width is None
            else b.linear(name, hidden, config.width, bias=True, split=False)
        )

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, rename=((r"^vlm\.(model\.)?", "model."), *names.rename))

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, width]."""
        return F.normalize(self.out(super().forward(batch)), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden
