"""Wraps norms: rows whose adapter has norms of its own are normed with their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from modulm.errors import EngineError
from modulm.nn import LayerNorm, Norm, RMSNorm
from modulm.ops import twins

if TYPE_CHECKING:
    import torch

    from modulm_adapter_lora.layers import Step
    from modulm_adapter_lora.prepared import LayerChange

__all__ = ["LoraLayerNorm", "LoraNorm", "LoraRMSNorm", "adapted_norm"]


class LoraNorm(Norm, ABC):
    """A norm with the weights of some slots' adapters beside its own.

    Steps in which no adapter has norms run the norm itself. refused: why no adapter can change it,
    or "".
    """

    def __init__(self, name: str, base: Any, step: Step) -> None:
        Module.__init__(self)
        self.name, self.base, self.step = name, base, step
        self.ops, self.eps = base.ops, base.eps
        self.changes: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.refused = ""

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            self.refused = "a kernel applies this norm together with other operations"
            return getattr(self.base, name)
        return super().__getattr__(name)

    @property
    def size(self) -> int:
        """Number of weights."""
        return len(self.base.weight)

    def put(self, slot: int, change: LayerChange | None, device: torch.device) -> None:
        """Put another adapter into the slot."""
        self.changes.pop(slot, None)
        if change is None or (change.norm is None and change.norm_bias is None):
            return
        weight = self.base.weight if change.norm is None else change.norm
        bias = getattr(self.base, "bias", None) if change.norm_bias is None else change.norm_bias
        bias = None if bias is None else bias.float().to(device)
        self.changes[slot] = weight.float().to(device), bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same shape."""
        out: Tensor = self.base(x)
        self._change(x, out)
        return out

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        out, stream = self.base.add(x, residual)
        self._change(stream, out)
        return out, stream

    def _change(self, x: Tensor, out: Tensor) -> None:
        """Norm the rows of changed slots again. x: what was normed. Raises EngineError."""
        groups = self.step.groups
        if groups is None or not self.changes or not self.step.special:
            return
        if len(x) != self.step.tokens:
            self.refused = "it does not run once for each token"
            if any(slot in self.changes for slot, *_ in groups.used):
                raise EngineError(f"{self.name}: an adapter cannot change it: {self.refused}")
            return
        for slot, rows in groups.rows():
            if slot in self.changes:
                at = rows.to(x.device)
                out[at] = self._normed(x[at].float(), *self.changes[slot]).to(out.dtype)

    @abstractmethod
    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x: [rows, size] fp32 -> the same shape. weight, bias: an adapter's, in fp32."""


class LoraRMSNorm(LoraNorm, RMSNorm):
    """An RMS norm."""

    def __init__(self, name: str, base: RMSNorm, step: Step) -> None:
        super().__init__(name, base, step)
        self.offset = base.offset

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return twins.rms_norm(x, weight, self.eps, offset=self.offset)


class LoraLayerNorm(LoraNorm, LayerNorm):
    """A layer norm."""

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)


def adapted_norm(name: str, norm: Any, step: Step) -> LoraNorm | None:
    """Wrap a norm; None for kinds that are not known."""
    if isinstance(norm, RMSNorm):
        return LoraRMSNorm(name, norm, step)
    return LoraLayerNorm(name, norm, step) if isinstance(norm, LayerNorm) else None
