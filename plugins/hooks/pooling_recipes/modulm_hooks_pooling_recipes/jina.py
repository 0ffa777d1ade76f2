"""Jina Embeddings v4 (arXiv 2506.18902): the pooling that its own code does after the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.pooling import PoolingRecipe, TextRules
from modulm.errors import CheckpointError

__all__ = ["JINA", "read_jina"]

JINA = "JinaEmbeddingsV4Model"
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
