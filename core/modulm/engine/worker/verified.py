"""A step's new tokens, as runs per row."""

from __future__ import annotations

import numpy as np

from modulm.contracts.step_part import Verified
from modulm.engine.sampling.sampler import Chosen

__all__ = ["first_of", "last_of", "verified_of"]


def verified_of(chosen: Chosen | None, rows: int | None = None) -> Verified:
    """Convert sampled tokens to runs of one token. rows: their number without padding."""
    if chosen is None:
        return Verified(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))
    sampled = chosen.result()
    tokens, accepted = sampled.tokens, np.ones(len(sampled.tokens), dtype=np.int32)
    if sampled.errors:
        accepted[tokens < 0] = 0
        tokens = tokens[tokens >= 0]
    logprobs = {index: (entry,) for index, entry in sampled.logprobs.items()}
    verified = Verified(tokens, accepted, logprobs, sampled.errors)
    return verified if rows is None else first_of(verified, rows)


def first_of(verified: Verified, rows: int) -> Verified:
    """Drop padding rows after the first `rows`."""
    if rows == len(verified.accepted):
        return verified
    accepted = verified.accepted[:rows]
    tokens = verified.tokens[: int(accepted.sum())]
    errors = {index: error for index, error in verified.errors.items() if index < rows}
    return Verified(tokens, accepted, verified.logprobs, errors)


def last_of(verified: Verified) -> np.ndarray:
    """Return the last token of each run: [rows], -1 for rows that failed."""
    tokens = np.append(verified.tokens, -1)
    lasts = np.where(verified.accepted > 0, verified.accepted.cumsum() - 1, -1)
    last: np.ndarray = tokens[lasts]
    return last
