"""Ternary weights (BitNet b1.58, Ma et al., arXiv 2402.17764), as transformers stores them.

`weight` [N / 4, K] holds 2-bit codes, 0 to 2 for -1 to 1: row r in the lowest bits, then row r + N
/ 4, and so on. `weight_scale` has one number per fused part, which divides the product
("bitlinear") or multiplies it ("autobitlinear", whose weights may also be stored as floats). In
online mode, the checkpoint has plain weights, which are rounded using their mean. Source:
transformers/integrations/bitnet.py, version 5.

Activations are rounded to integers with a scale per token and 256 inputs. With `use_rms_norm` they
are normalised first, with a separate weight per fused part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    LinearSpec,
    ParamSpec,
)
from modulm_quantized import ACTIVATIONS, CodedMethod, Codes, StoredAs, below, per_row

__all__ = ["BitNet", "BitNetConfig"]

_ROWS = 4
_TINY = 1e-5


@frozen
class BitNetConfig:
    """`quantization_config` of config.json.

    `activations`: what kernels round activations to, "int8" or "bf16" (no rounding).
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "bitnet"
    linear_class: str = field(
        default="bitlinear", validator=validators.in_(("bitlinear", "autobitlinear"))
    )
    quantization_mode: str = field(
        default="offline", validator=validators.in_(("offline", "online"))
    )
    use_rms_norm: bool = False
    rms_norm_eps: float = 1e-6
    modules_to_not_convert: tuple[str, ...] | None = None
    activations: str = field(default="int8", validator=validators.in_(ACTIVATIONS))

    @property
    def online(self) -> bool:
        """Whether the checkpoint holds unquantized weights."""
        return self.linear_class == "autobitlinear" and self.quantization_mode == "online"


class BitNet(CodedMethod):
    """Weights -1, 0 and 1 with one scale per tensor."""

    name = "bitnet"
    Config: ClassVar[type] = BitNetConfig
    config: BitNetConfig
    LISTS: ClassVar = {"modules_to_not_convert": below}
    HELD = ("linear",)

    def skips(self, name: str) -> bool:
        return below(name, self.config.modules_to_not_convert or ())

    def activations(self, spec: LinearSpec) -> str:
        return self.config.activations

    def scheme(self, spec: LinearSpec) -> StoredAs:
        when = ", rounded at load" if self.config.online else ""
        return StoredAs(f"ternary, a scale per tensor{when}", "int", 2)

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        norm = {"norm": ParamSpec((PARTS, INPUTS), "float32", "rms_norm.weight")}
        norm = norm if self.config.use_rms_norm else {}
        if self.config.online:
            return {"weight": ParamSpec((OUTPUTS, INPUTS), spec.dtype), **norm}
        return {
            "weight": ParamSpec((OUTPUTS, INPUTS), "uint8", transform=_ternary),
            "scale": ParamSpec((PARTS,), "float32", "weight_scale"),
            **norm,
        }

    def example(self, spec: LinearSpec, name: str) -> Tensor | None:
        if name != "weight" or self.config.online:
            return None
        return torch.arange(spec.inputs) % 3

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        norm = layer._parameters.get("norm")
        super().finish(layer, spec)
        keeper: Any = layer
        keeper.norm_weight = None if norm is None else norm.detach()

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        whole = self._whole(stored, spec)
        if not self.config.use_rms_norm:
            return (whole,)
        ends = torch.tensor(spec.parts).cumsum(0).tolist()
        return tuple(
            whole.rows(slice(end - size, end)) for size, end in zip(spec.parts, ends, strict=True)
        )

    def _whole(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> Codes:
        weight = stored["weight"]
        if self.config.online:
            pieces = [_rounded(piece) for piece in weight.split(list(spec.parts))]
            values, scales = (torch.cat(one) for one in zip(*pieces, strict=True))
        else:
            values, scales = weight, per_row(stored["scale"], spec)
            scales = scales if self.config.linear_class == "autobitlinear" else 1 / scales
        return Codes(values, scales, torch.ones_like(scales))

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        module: Any = layer
        if module.norm_weight is None:
            return super().apply(layer, x, bias)
        wide = x.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        parts = [
            self._product(packed, (unit.to(x.dtype) * weight.to(x.dtype)), None)
            for packed, weight in zip(module.quantized, module.norm_weight, strict=True)
        ]
        whole = torch.cat(parts, -1)
        return whole if bias is None else whole + bias


def _ternary(stored: Tensor) -> Tensor:
    """Convert 2-bit codes, or floats -1 to 1, to [N, K] uint8, 0 to 2. Raises ValueError."""
    if stored.dtype != torch.uint8:
        codes = stored + 1
        if not stored.is_meta and not bool(((codes == 0) | (codes == 1) | (codes == 2)).all()):
            raise ValueError("weights are not all -1, 0 or 1")
        return codes.to(torch.uint8)
    return torch.cat([(stored >> (2 * row)) & 3 for row in range(_ROWS)])


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [N, K] to codes 0 to 2 and scales [N, 1]."""
    wide = weight.float()
    scale = wide.abs().mean().clamp_(min=_TINY)
    values = (wide / scale).round_().clamp_(-1, 1).add_(1).to(torch.uint8)
    return values, scale.expand(len(weight), 1)
