"""MXFP8 checkpoints (OCP Microscaling Formats (MX) Specification, version 1.0).

`weight` [N, K] holds e4m3 numbers, `weight_scale` (or `weight_scale_inv`) [N, K / 32] exponents of
2 plus 127. Inputs are quantized the same way where that is fast. A plain checkpoint is quantized at
load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import torch
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import INPUTS, OUTPUTS, LinearSpec, ParamSpec
from modulm_quantized import CodedMethod, Codes, ReadOrRound, ReadOrRoundConfig, StoredAs, below

__all__ = ["MXFP8", "MXFP8Config"]

_BLOCK, _BIAS = 32, 127
_NEEDLESS = re.compile(r"\.(input_scale|[kv]_scale)$")


@frozen
class MXFP8Config(ReadOrRoundConfig):
    """`quantization_config` of config.json; for a plain checkpoint, the layers to quantize."""

    fmt: str = field(default="e4m3", validator=validators.in_(("e4m3",)))
    scale_fmt: str = field(default="ue8m0", validator=validators.in_(("ue8m0", "e8m0")))
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, ...] = field(
        default=(1, 32), validator=validators.in_(((1, 32),))
    )
    modules_to_not_convert: tuple[str, ...] | None = None
    ignored_layers: tuple[str, ...] | None = None


class MXFP8(ReadOrRound, CodedMethod):
    """e4m3 with a power-of-two scale per 32 inputs."""

    name = "mxfp8"
    Config: ClassVar[type] = MXFP8Config
    config: MXFP8Config
    LISTS: ClassVar = {"modules_to_not_convert": below, "ignored_layers": below}

    ROUNDS_TO = "mxfp8"
    HELD = ("linear", "expert")

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        if spec.input_shard.total % _BLOCK or spec.inputs % _BLOCK:
            return f"{cls.name}: {spec.inputs} inputs are not a multiple of {_BLOCK}"
        return super().rejects(spec, platform)

    def skips(self, name: str) -> bool:
        listed = (self.config.modules_to_not_convert or ()) + (self.config.ignored_layers or ())
        return below(name, listed)

    def rename(self, name: str) -> str | None:
        return None if _NEEDLESS.search(name) else name.replace("weight_scale_inv", "weight_scale")

    def scheme(self, spec: LinearSpec) -> StoredAs:
        return StoredAs(f"e4m3, an exponent per {_BLOCK} inputs", "fp8", 8, _BLOCK, powers=True)

    def designed_activations(self, spec: LinearSpec) -> str:
        return "mxfp8"

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        return {
            "weight": ParamSpec((OUTPUTS, INPUTS), "float8_e4m3fn"),
            "exponent": ParamSpec(
                (OUTPUTS, INPUTS.blocks(_BLOCK)),
                "uint8",
                "weight_scale",
                transform=lambda t: t.view(torch.uint8),
            ),
        }

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        return (Codes(stored["weight"], torch.exp2(stored["exponent"].float() - _BIAS)),)
