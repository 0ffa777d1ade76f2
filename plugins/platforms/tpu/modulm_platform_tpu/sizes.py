"""The sizes that steps are padded to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from modulm.contracts.platform import StepSizes
from modulm.errors import ConfigError

__all__ = ["sizes_of", "steps_of"]

_LEAST_ROWS, _LEAST_TOKENS, _FACTOR = 8, 16, 4


def sizes_of(
    most_rows: int, most_tokens: int, rows: Sequence[int] = (), tokens: Sequence[int] = ()
) -> StepSizes:
    """Return the sizes for steps of up to `most_rows` rows and `most_tokens` tokens.

    rows, tokens: the requested sizes; the largest possible ones are added. By default each size is
    four times the one before. Raises ConfigError for sizes below 1.
    """
    for name, sizes in (("rows", rows), ("tokens", tokens)):
        if any(size < 1 for size in sizes):
            raise ConfigError(f"platforms.tpu.{name}", f"{min(sizes)} is not a size")
    # Padding is a row of its own, with at least one token. A step of one token per row has as many
    # tokens as rows.
    own_rows = _until(rows or _ladder(_LEAST_ROWS, most_rows), most_rows + 1)
    own_tokens = _until(tokens or _ladder(_LEAST_TOKENS, most_tokens), most_tokens + most_rows + 1)
    merged = tuple(sorted({*own_tokens, *own_rows}))
    # Steps that verify drafts sample more tokens than they have rows.
    more = (size for size in merged if size > own_rows[-1])
    return StepSizes(rows=own_rows, tokens=merged, samples=(*own_rows, *more))


def steps_of(sizes: StepSizes) -> list[np.ndarray]:
    """Return the tokens of each row of a step of every size, the largest step first."""
    pairs = [(rows, tokens) for tokens in sizes.tokens for rows in sizes.rows if rows <= tokens]
    return [
        np.diff(np.linspace(0, tokens, rows + 1).astype(np.int32)).astype(np.int32)
        for rows, tokens in reversed(pairs)
    ]


def _ladder(size: int, most: int) -> list[int]:
    sizes = []
    while size < most:
        sizes.append(size)
        size *= _FACTOR
    return sizes


def _until(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(sorted({*(size for size in sizes if size < most), most}))
