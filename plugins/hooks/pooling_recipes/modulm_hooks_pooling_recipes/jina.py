"""Jina Embeddings v4 (arXiv 2506.18902) and reranker v3 (arXiv 2509.25085): the pooling that their
own code does after the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.contracts.pooling import PoolingRecipe, TextRules
from modulm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["JINA", "RANKING", "read_jina", "read_ranking"]

JINA, RANKING = "JinaEmbeddingsV4Model", "JinaForRanking"
#: Tokens after each document and after the query, whose vectors are compared.
_ENDS = (151670, 151671)
_PROMPTS = {"query": "Query: ", "passage": "Passage: "}


def read_jina(table: Mapping[str, Any], file: str) -> PoolingRecipe:
    """Return the recipe for a config.json `table`. Raises CheckpointError.

    The vector of a text is the mean over its tokens; that of an image, over the tokens from its
    begin token to its end token.
    """
    way = table.get("single_vector_pool_strategy", "mean")
    if way != "mean":
        raise CheckpointError(f"{file}: single_vector_pool_strategy: {way!r}, mean was expected")
    settings: dict[str, Any] = {"pooling_type": "MEAN", "normalize": True}
    span = [table.get(f"vision_{end}_token_id") for end in ("start", "end")]
    if all(type(token) is int for token in span):
        settings["pooled_span"] = span
    if table.get("truncate_dim") is not None:
        settings["dimensions"] = table["truncate_dim"]
    texts = TextRules(prompts=_PROMPTS, dimensions=table.get("matryoshka_dims") or ())
    return PoolingRecipe(settings=settings, texts=texts)


def read_ranking(folder: Path) -> PoolingRecipe:
    """Return the recipe of the reranker: the vectors of all documents in a prompt, then that of the
    query, through two linear layers.
    """

    def layers(device: torch.device) -> tuple[Any, ...]:
        from modulm_hooks_pooling_recipes.layers import read_projection

        names = ("projector.0.weight", "ReLU"), ("projector.2.weight", "Identity")
        return tuple(read_projection(folder, name, device, act) for name, act in names)

    settings = {"task": "token_embed", "normalize": False, "embedded_token_ids": _ENDS}
    return PoolingRecipe(settings=settings, layers=layers)
