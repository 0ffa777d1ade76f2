"""ColBERT (arXiv 2004.12832) as its authors store it: BERT, and `linear.weight` for its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.contracts.pooling import PoolingRecipe

if TYPE_CHECKING:
    import torch

__all__ = ["ENCODER", "is_colbert", "read_colbert"]

#: The architecture that runs what config.json calls HF_ColBERT.
ENCODER = "BertModel"
_NAME = "HF_ColBERT"


def is_colbert(architectures: Sequence[str]) -> bool:
    """Whether config.json names the model of ColBERT's authors."""
    return _NAME in architectures


def read_colbert(folder: Path) -> PoolingRecipe:
    """Vectors of tokens, through the linear layer that lies beside the encoder's weights."""

    def layers(device: torch.device) -> tuple[Any, ...]:
        from modulm_hooks_pooling_recipes.layers import read_projection

        return (read_projection(folder, "linear.weight", device),)

    return PoolingRecipe(settings={"task": "token_embed"}, layers=layers)
