"""The periodic activation of Qwen-Omni's codecs."""

from __future__ import annotations

import torch
from torch import Tensor

from modulm.nn import Builder
from modulm_speakers.codec import Float32Module

__all__ = ["Snake"]

#: Added to the scale.
_TINY = 1e-9


class Snake(Float32Module):
    """x + sin(x * exp(alpha))^2 / exp(beta), per channel (arXiv 2006.08195)."""

    alpha: Tensor
    beta: Tensor

    def __init__(self, b: Builder, name: str, channels: int) -> None:
        super().__init__()
        for attribute in ("alpha", "beta"):
            self.add(b, f"{name}.{attribute}", attribute, channels)

    def activate(self, x: Tensor) -> Tensor:
        """[n, channels, time] -> [n, channels, time]."""
        alpha, beta = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x + torch.sin(x * alpha).square() / (beta + _TINY)
