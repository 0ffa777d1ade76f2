"""The target model, as speculators see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from modulm.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm.contracts.platform import Platform
    from modulm.loading import Loaded

__all__ = ["Target"]


@frozen(eq=False)
class Target:
    """The loaded target model, which verifies drafts. config: resolved. mesh: the ranks that share
    it.
    """

    config: EngineConfig
    loaded: Loaded
    platform: Platform
    mesh: Mesh = field(factory=Mesh)

    @property
    def model(self) -> Model:
        """The model."""
        return self.loaded.model

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Embed tokens with the target's table: [n] int64 -> [n, hidden]."""
        return self.model.embeddings(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits with the target's head: [n, hidden] -> [n, vocabulary]."""
        return self.model.logits(hidden)
