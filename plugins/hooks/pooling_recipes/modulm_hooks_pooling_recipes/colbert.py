"""ColBERT (arXiv 2004.12832) in its authors' format: BERT and a `linear.weight`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.contracts.pooling import PoolingRecipe

if TYPE_CHECKING:
    import torch

__all__ = ["ENCODER", "is_colbert", "read_colbert"]

#: The architecture that runs models called HF_ColBERT in config.json.
ENCODER = "BertModel"
_NAME = "HF_ColBERT"


def is_colbert(architectures: Sequence[str]) -> bool:
    """Whether config.json names the authors' ColBERT model."""
    return _NAME in architectures


def read_colbert(folder: Path) -> PoolingRecipe:
    """Return the recipe: token vectors through the linear layer in the encoder's files."""

    def layers(device: torch.device) -> tuple[Any, ...]:
        from modulm_hooks_pooling_recipes.layers import read_projection

        return (read_projection(folder, "linear.weight", device),)

    return PoolingRecipe(settings={"task": "token_embed"}, layers=layers)
