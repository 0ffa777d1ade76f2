"""What a speculator is told of the model whose tokens it drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm.contracts.platform import Platform
    from modulm.loading import Loaded

__all__ = ["Target"]


@frozen(eq=False)
class Target:
    """The model that verifies, as it was loaded. config: with its automatic values resolved."""

    config: EngineConfig
    loaded: Loaded
    platform: Platform

    @property
    def model(self) -> Model:
        """The model itself."""
        return self.loaded.model

    def embeddings(self, tokens: Tensor) -> Tensor:
        """tokens: [n] int64 -> [n, hidden] by the model's own table, which is not copied."""
        return self.model.embeddings(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden] -> [n, vocabulary] by the model's own head, which is not copied."""
        return self.model.logits(hidden)
