"""No quantization: weights in the model's dtype, packed if a kernel needs them packed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from attrs import frozen

from modulm.contracts.ops import Op
from modulm.contracts.platform import Platform
from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    CheckpointInfo,
    LinearKind,
    LinearSpec,
    ParamSpec,
    QuantizationMethod,
    Region,
    Writer,
)

__all__ = ["Plain", "PlainConfig"]


@frozen
class PlainConfig:
    """This method has no settings."""


class Plain(QuantizationMethod):
    """Keeps weights unquantized.

    Linear layers and stacks of experts keep only the packed form (ops `pack_linear`,
    `pack_experts`), which also serves an embedding table that is tied to the head. Other tables
    keep the plain tensor.
    """

    name = "none"
    api = 2
    Config = PlainConfig

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None if checkpoint.quantization else "config.json has no quantization_config"

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        return (
            None
            if spec.dtype in platform.dtypes
            else f"{platform.name} does not support {spec.dtype}"
        )

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec((OUTPUTS, INPUTS), spec.dtype)}

    def allocate(self, layer: torch.nn.Module, spec: LinearSpec) -> bool:
        blank, providers = self.ops.find("blank_linear"), self.ops.providers
        other = spec.kind in (LinearKind.EMBEDDING, LinearKind.EXPERT)
        if other or blank is None or providers["blank_linear"] != providers["linear"]:
            return False
        weight = layer.get_parameter("weight")
        layer.packed = blank(*weight.shape, weight.dtype)
        layer.register_parameter("weight", None)
        return True

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        if spec.kind is LinearKind.EMBEDDING:
            return
        if spec.kind is LinearKind.EXPERT:
            layer.packed = self.ops.pack_experts(layer.weight, len(spec.parts))
        else:
            layer.packed = self.ops.pack_linear(layer.weight)
        if layer.packed is not layer.weight:
            layer.register_parameter("weight", None)

    def writer(self, layer: torch.nn.Module, spec: LinearSpec, name: str) -> Writer | None:
        keeper: Any = layer
        stored, packed = layer._parameters.get(name), getattr(keeper, "packed", None)
        if isinstance(packed, torch.Tensor | None) and stored is not None:
            return partial(_copy, stored)
        experts = spec.kind is LinearKind.EXPERT
        op, product = ("overwrite_linear", "linear")
        if experts:
            op, product = ("overwrite_experts", "fused_experts")
        write, providers = self.ops.find(op), self.ops.providers
        if write is None or providers[op] != providers[product]:
            return None
        if name == "weight":
            return partial(_overwrite_experts if experts else _overwrite, write, packed)
        if stored is None or experts:
            return None
        return partial(_copy_bias, self.ops.find("overwrite_bias"), packed, stored)

    def share(self, head: torch.nn.Module, table: torch.nn.Module) -> None:
        if self.ops.supports("embedding_packed") and head.packed is not table.weight:
            table.packed = head.packed
            table.register_parameter("weight", None)

    def embed(self, layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        if layer.weight is not None:
            return super().embed(layer, ids)
        rows: torch.Tensor = self.ops.embedding_packed(ids, layer.packed)
        return rows

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out: torch.Tensor = self.ops.linear(x, layer.packed, bias)
        return out

    def experts(self, layer: torch.nn.Module) -> object:
        return layer.packed

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> torch.Tensor:
        weight: torch.Tensor
        if spec.kind is LinearKind.EXPERT:
            weight = torch.stack([layer.packed[expert] for expert in range(spec.experts)])
        elif spec.kind is LinearKind.EMBEDDING and layer.weight is not None:
            weight = layer.weight
        else:
            weight = self.ops.unpack_linear(layer.packed)
        return weight


def _copy(
    parameter: torch.Tensor, region: Region, values: torch.Tensor, sparse: bool = False
) -> None:
    target = parameter[region]
    if sparse:
        values = torch.where(values.isnan(), target, values.to(target.device, target.dtype))
    target.copy_(values)


def _copy_bias(
    overwrite: Any,
    packed: object,
    bias: torch.Tensor,
    region: Region,
    values: torch.Tensor,
    sparse: bool = False,
) -> None:
    _copy(bias, region, values, sparse)
    overwrite(packed, bias)


def _overwrite(
    overwrite: Op, packed: object, region: Region, values: torch.Tensor, sparse: bool = False
) -> None:
    """Overwrite rows of a packed weight; regions have all columns."""
    overwrite(packed, _first(region, 0), values, sparse=sparse)


def _overwrite_experts(
    overwrite: Op, packed: object, region: Region, values: torch.Tensor, sparse: bool = False
) -> None:
    """Overwrite rows of packed experts; regions have all columns."""
    stack = values if values.dim() == len(region) else values.unsqueeze(0)
    overwrite(packed, _first(region, 0), _first(region, 1), stack, sparse=sparse)


def _first(region: Region, dim: int) -> int:
    """Return where a region begins; the regions of a packed weight are slices."""
    entries = region[dim] if len(region) > dim else slice(None)
    return (entries.start or 0) if isinstance(entries, slice) else entries[0]
