"""Outputs of inner encoder layers as inputs of text layers (DeepStack, arXiv 2406.04334)."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm_towers.multimodal import MultimodalModel

__all__ = ["DeepStack"]


class _Deep(Module):
    """A text layer, followed by the addition of an inner encoder layer's output."""

    def __init__(self, layer: Module, level: int, hidden: int) -> None:
        super().__init__()
        self.layer, self.part = layer, slice(level * hidden, (level + 1) * hidden)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        x, residual = self.layer(x, residual, batch)
        deepstack = batch.extras.get("deepstack")
        return (x if deepstack is None else x + deepstack[:, self.part].to(x.dtype)), residual


class DeepStack(MultimodalModel):
    """Mixin before a model whose embeddings have further columns for the first text layers."""

    def inject(self, levels: int) -> None:
        """Let the first `levels` text layers add their columns; called by `make_encoders`."""
        for level in range(levels):
            layer = self.text.layers[level]
            self.text.layers[level] = _Deep(layer, level, self.config.hidden_size)

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(self._spread(batch))

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        return super().states(self._spread(batch), layers)

    def _spread(self, batch: Batch) -> Batch:
        """Return the batch with plain embeddings, and the inputs of deeper layers as extras."""
        hidden, embeds = self.config.hidden_size, batch.embeds
        if embeds is None or embeds.shape[1] == hidden or self.only_encodes:
            return batch
        deep = {**batch.extras, "deepstack": embeds[:, hidden:]}
        return evolve(batch, embeds=embeds[:, :hidden], extras=deep)
