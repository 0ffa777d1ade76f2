"""A speculator by the contract of 0.1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from modulm.contracts.speculator import Speculator

__all__ = ["Repeat"]


class Repeat(Speculator):
    """Proposes the last token again."""

    name = "canary"
    api = 1

    def propose(self, rows: np.ndarray, histories: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [history[-1:].astype(np.int64) for history in histories]
