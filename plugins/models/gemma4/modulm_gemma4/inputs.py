"""Per-layer token embeddings of Gemma 3n and 4."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from modulm.nn import Builder
from modulm_gemma4.config import SharingConfig

__all__ = ["LayerInputs"]


class LayerInputs(Module):
    """A vector per token and layer: a table row plus a projection of the token's embedding.

    Tokens beyond the table, which stand for images and sound, use row 0.
    """

    def __init__(self, c: SharingConfig, b: Builder) -> None:
        super().__init__()
        self.layers, width, self.ops = c.num_hidden_layers, c.hidden_size_per_layer_input, b.ops
        self.known = c.vocab_size_per_layer_input
        self.scale, total = c.hidden_size**-0.5, c.num_hidden_layers * width
        self.table = b.embedding("embed_tokens_per_layer", self.known, total, scale=width**0.5)
        self.project = b.linear("per_layer_model_projection", c.hidden_size, total, split=False)
        self.norm = b.rms_norm("per_layer_projection_norm", width, c.rms_norm_eps)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x: [tokens, hidden]; tokens: [tokens] int64 -> [tokens, layers, width]."""
        shape = (x.shape[0], self.layers, -1)
        seen = self.norm(self.ops.scale(self.project(x), self.scale).view(shape))
        both: Tensor = (
            seen + self.table.lookup(tokens.where(tokens < self.known, 0)).view(shape)
        ) * 2.0**-0.5
        return both
