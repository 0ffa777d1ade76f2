"""BGE-M3 (arXiv 2402.03216): XLM-RoBERTa with a vector per text, a weight per token, and a vector
per token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modulm.errors import CheckpointError
from modulm.nn import Builder
from modulm_bert.roberta import XLMRobertaModel

__all__ = ["BgeM3EmbeddingModel"]

_WEIGHTS = "sparse_linear.pt"
_PARTS = ("weight", "bias")


class BgeM3EmbeddingModel(XLMRobertaModel):
    """Vectors of texts and tokens (`embed`, `token_embed`), weights of tokens (`token_classify`).

    The map to weights is a file of its own beside the encoder's. That of token vectors is read with
    the pooling settings.
    """

    tasks = ("embed", "token_embed", "token_classify")

    def __init__(self, config: Any, build: Builder) -> None:
        super().__init__(config, build)
        self._hidden, self._device = config.hidden_size, build.shared.device
        self._sparse: tuple[Tensor, Tensor] | None = None

    def load(self, checkpoint: Path) -> bool:
        """Read the map to weights; the encoder's weights are loaded as those of other models."""
        file = checkpoint / _WEIGHTS
        try:
            stored = torch.load(file, map_location="cpu", weights_only=True)
            weight, bias = (stored[name].to(self._device, torch.float32) for name in _PARTS)
        except (OSError, RuntimeError, KeyError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{file}: {error}") from error
        if weight.shape != (1, self._hidden) or bias.shape != (1,):
            raise CheckpointError(f"{file}: weight [1, {self._hidden}] and bias [1] are required")
        self._sparse = weight, bias
        return False

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, 1]: weights of tokens before the ReLU."""
        if self._sparse is None:
            raise CheckpointError(f"{_WEIGHTS} is not loaded")
        return F.linear(hidden.float(), *self._sparse)
