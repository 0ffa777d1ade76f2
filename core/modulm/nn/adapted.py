"""Adapters: wraps a layer's quantization method in an adapter bank's changes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from modulm.contracts.quantization import CheckpointInfo, LinearKind, QuantizationMethod

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from modulm.contracts.adapter import AdaptedLayer, AdapterBank
    from modulm.contracts.platform import Platform
    from modulm.contracts.quantization import LinearSpec, ParamSpec, Writer

__all__ = ["adapted", "bypassed", "same_method"]


def adapted(
    method: QuantizationMethod, spec: LinearSpec, bank: AdapterBank | None
) -> QuantizationMethod:
    """Return the method, wrapped if the bank adapts the layer."""
    around = None if bank is None else bank.layer(spec)
    return method if around is None else _Adapted(method, around)


def same_method(one: QuantizationMethod, other: QuantizationMethod) -> bool:
    """Whether two layers have the same method, ignoring adapters."""
    return _base(one) is _base(other)


def bypassed(method: QuantizationMethod) -> None:
    """Report that a layer's weight is used without `apply`, so adapters cannot change it."""
    if isinstance(method, _Adapted):
        method.around.bypass()


def _base(method: QuantizationMethod) -> QuantizationMethod:
    return method.base if isinstance(method, _Adapted) else method


class _Adapted(QuantizationMethod):
    """Stores a layer like `base`; `around` changes its results."""

    name = "adapted"
    Config = object

    def __init__(self, base: QuantizationMethod, around: AdaptedLayer) -> None:
        super().__init__(base.config, base.platform, base.ops)
        self.base, self.around = base, around

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        return None

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        return self.base.create(spec)

    def finish(self, layer: Module, spec: LinearSpec) -> None:
        self.base.finish(layer, spec)
        apply = self.base.embed if spec.kind is LinearKind.EMBEDDING else self.base.apply
        self.around.finish(partial(apply, layer))

    def writer(self, layer: Module, spec: LinearSpec, name: str) -> Writer | None:
        return self.base.writer(layer, spec, name)

    def share(self, head: Module, table: Module) -> None:
        self.base.share(head, table)

    def dequantize(self, layer: Module, spec: LinearSpec) -> Tensor:
        return self.base.dequantize(layer, spec)

    def experts(self, layer: Module) -> object:
        return self.base.experts(layer)

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.around.apply(partial(self.base.apply, layer), x, bias)

    def embed(self, layer: Module, ids: Tensor) -> Tensor:
        return self.around.embed(partial(self.base.embed, layer), ids)
