"""No quantization: weights in the model's dtype, packed where a kernel wants them packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    CheckpointInfo,
    LinearSpec,
    ParamSpec,
    QuantizationMethod,
)

__all__ = ["Plain", "PlainConfig"]


@frozen
class PlainConfig:
    """There is nothing to set."""


class Plain(QuantizationMethod):
    """Holds the weight as it is stored. Linear layers and stacks of experts keep only its packed
    form (ops `pack_linear`, `pack_experts`), which also serves a table that is the head's weight;
    other tables keep the plain tensor."""

    name = "none"
    api = 2
    Config = PlainConfig

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None if checkpoint.quantization else "config.json has no quantization_config"

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        return None if spec.dtype in platform.dtypes else f"{platform.name} has no {spec.dtype}"

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec((OUTPUTS, INPUTS), spec.dtype)}

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        if spec.kind == "embedding":
            return
        if spec.kind == "expert":
            layer.packed = self.ops.pack_experts(layer.weight, len(spec.parts))
        else:
            layer.packed = self.ops.pack_linear(layer.weight)
        if layer.packed is not layer.weight:
            layer.register_parameter("weight", None)

    def share(self, head: torch.nn.Module, table: torch.nn.Module) -> None:
        if hasattr(self.ops, "embedding_packed") and head.packed is not table.weight:
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
        if spec.kind == "expert":
            weight = torch.stack([layer.packed[expert] for expert in range(spec.experts)])
        elif spec.kind == "embedding" and layer.weight is not None:
            weight = layer.weight
        else:
            weight = self.ops.unpack_linear(layer.packed)
        return weight
