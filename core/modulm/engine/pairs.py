"""Pairs of texts for scoring: how they are matched, and the cosine of two embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from modulm.engine.outputs import PoolingRequestOutput, ScoringOutput
from modulm.errors import RequestError

if TYPE_CHECKING:
    from modulm.text.tokenizer import Tokenizer

__all__ = ["cosine", "pair", "paired"]


def paired(
    first: str | Sequence[str], second: str | Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Two lists of one length; a single first text goes with every second one."""
    left = [first] if isinstance(first, str) else list(first)
    right = [second] if isinstance(second, str) else list(second)
    if len(left) == 1:
        left = left * len(right)
    if not left or len(left) != len(right):
        raise RequestError(
            f"data_2: {len(left)} texts are needed, one for each of data_1", "data_2"
        )
    return left, right


def pair(tokenizer: Tokenizer, first: str, second: str) -> tuple[list[int], int | None]:
    """The ids of two texts in one prompt, and where the second begins."""
    return tokenizer.encode_pair(first, second), tokenizer.second_start(first, second)


def cosine(first: PoolingRequestOutput, second: PoolingRequestOutput) -> PoolingRequestOutput:
    """The score of two normalised embeddings, as the answer for both of their prompts."""
    score = float(np.dot(first.outputs.data, second.outputs.data))
    tokens = [*first.prompt_token_ids, *second.prompt_token_ids]
    name = f"{first.request_id}-{second.request_id}"
    return PoolingRequestOutput(name, ScoringOutput(score), tokens)
