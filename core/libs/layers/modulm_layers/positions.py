"""Learned positions, added to the token embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from modulm.contracts.model import Batch
    from modulm.nn import Embedding

__all__ = ["LearnedPositions"]


class LearnedPositions(Module):
    """Token vectors plus a learned vector for each position."""

    def __init__(self, tokens: Embedding, positions: Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden] for the batch's tokens."""
        x: Tensor = self.tokens(batch)
        both: Tensor = self.tokens.method.ops.add(x, self.positions.lookup(batch.positions))
        return both
