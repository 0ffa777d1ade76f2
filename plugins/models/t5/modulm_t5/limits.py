"""The maximum length of a text."""

from __future__ import annotations

__all__ = ["LONGEST"]

#: Maximum tokens of either side if config.json has no `n_positions`: T5's trained length. Relative
#: positions are unbounded, so the file may allow more.
LONGEST = 512
