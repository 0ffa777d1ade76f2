"""What a step's rows gave, as runs of tokens."""

from __future__ import annotations

import numpy as np

from modulm.contracts.step_part import Verified
from modulm.engine.sampling.sampler import Chosen

__all__ = ["last_of", "verified_of"]


def verified_of(chosen: Chosen | None) -> Verified:
    """What was chosen, as runs of one token."""
    if chosen is None:
        return Verified(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))
    sampled = chosen.result()
    tokens, accepted = sampled.tokens, np.ones(len(sampled.tokens), dtype=np.int32)
    if sampled.errors:
        accepted[tokens < 0] = 0
        tokens = tokens[tokens >= 0]
    logprobs = {place: (entry,) for place, entry in sampled.logprobs.items()}
    return Verified(tokens, accepted, logprobs, sampled.errors)


def last_of(verified: Verified) -> np.ndarray:
    """[rows]: the last token of each run, -1 for rows that failed."""
    tokens = np.append(verified.tokens, -1)
    lasts = np.where(verified.accepted > 0, verified.accepted.cumsum() - 1, -1)
    last: np.ndarray = tokens[lasts]
    return last
