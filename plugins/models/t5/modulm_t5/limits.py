"""How long a text may be."""

from __future__ import annotations

__all__ = ["LONGEST"]

#: Tokens of either side where config.json has no `n_positions`: what T5 was trained with. Distances
#: have no end, so more may be said there.
LONGEST = 512
