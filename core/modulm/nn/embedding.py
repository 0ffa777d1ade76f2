"""Token embedding and the LM head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from modulm.nn.linear import Linear

if TYPE_CHECKING:
    from modulm.contracts.model import Batch
    from modulm.contracts.quantization import LinearSpec, QuantizationMethod
    from modulm.parallel import ProcessGroup

__all__ = ["Embedding", "Head", "softcap"]


class Embedding(Module):
    """Token embeddings, times `scale`, or the batch's own embeddings (`Batch.embeds`).

    scales_given: whether `Batch.embeds` are scaled as well.
    """

    scales_given = False

    def __init__(self, spec: LinearSpec, method: QuantizationMethod, scale: float = 1.0) -> None:
        super().__init__()
        self.spec, self.method = spec, method
        stored = torch.tensor(scale, dtype=getattr(torch, spec.dtype), device="cpu")
        self.factor = 1.0 if scale == 1.0 else stored.item()

    def forward(self, batch: Batch) -> Tensor:
        """Embed the batch's tokens: [tokens, hidden]."""
        x = self.lookup(batch.tokens)
        if batch.embeds is None or batch.embeds_mask is None:
            return x
        embeds = batch.embeds.to(x.dtype)
        if self.scales_given:
            embeds = self._scaled(embeds)
        return torch.where(batch.embeds_mask[:, None], embeds, x)

    def lookup(self, ids: Tensor) -> Tensor:
        """Embed ids: [tokens] int64 -> [tokens, hidden]. Rounds the scale to the table's dtype."""
        return self._scaled(self.method.embed(self, ids))

    def _scaled(self, x: Tensor) -> Tensor:
        if self.factor == 1.0:
            return x
        scaled: Tensor = self.method.ops.scale(x, self.factor)
        return scaled


class Head(Linear):
    """LM head: [n, hidden] -> [n, vocabulary], gathered from all ranks, scaled and soft-capped."""

    def __init__(
        self,
        spec: LinearSpec,
        method: QuantizationMethod,
        group: ProcessGroup,
        *,
        scale: float = 1.0,
        cap: float = 0.0,
    ) -> None:
        super().__init__(spec, method, None)
        self.group, self.factor, self.cap = group, scale, cap

    def forward(self, x: Tensor) -> Tensor:
        logits = self.group.all_gather(super().forward(x))
        if self.factor != 1.0:
            logits = logits * self.factor
        return softcap(logits, self.cap) if self.cap else logits


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118)."""
    return cap * torch.tanh(x / cap)
