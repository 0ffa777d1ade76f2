"""ColBERT (arXiv 2004.12832) in its authors' format: an encoder and a `linear.weight`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.contracts.pooling import PoolingRecipe

if TYPE_CHECKING:
    import torch

__all__ = ["encoder", "is_colbert", "read_colbert"]

#: What config.json calls the model, and the architectures that run it.
_NAME, _BERT, _JINA = "HF_ColBERT", "BertModel", "ColBERTJinaRobertaModel"


def encoder(architectures: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """Return the architecture of the encoder inside a model that config.json calls HF_ColBERT."""
    if _NAME not in architectures:
        return None
    return _JINA if config.get("position_embedding_type") == "rotary" else _BERT


def is_colbert(architectures: Sequence[str]) -> bool:
    """Whether the token vectors pass `linear.weight`."""
    return bool({_NAME, _JINA} & set(architectures))


def read_colbert(folder: Path) -> PoolingRecipe:
    """Return the recipe: token vectors through the linear layer in the encoder's files."""

    def layers(device: torch.device) -> tuple[Any, ...]:
        from modulm_hooks_pooling_recipes.layers import read_projection

        return (read_projection(folder, "linear.weight", device),)

    return PoolingRecipe(settings={"task": "token_embed"}, layers=layers)
