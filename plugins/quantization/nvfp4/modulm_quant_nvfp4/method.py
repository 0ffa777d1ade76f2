"""NVFP4 checkpoints: 4-bit floats with an e4m3 scale per 16 inputs.

`weight` (or `weight_packed`) [N, K / 2] holds e2m1 numbers, two per byte with the even k in the low
half; `weight_scale` [N, K / 16] holds scales. Each fused part has a number that multiplies the
scales (`weight_scale_2`) or divides them (`weight_global_scale`). Inputs are quantized the same way
where that is fast, with a number per token instead of the stored one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    CheckpointInfo,
    LinearSpec,
    ParamSpec,
)
from modulm.errors import CheckpointError
from modulm_quantized import (
    E2M1,
    CodedMethod,
    Codes,
    ReadOrRound,
    ReadOrRoundConfig,
    StoredAs,
    below,
    nibbles,
    per_row,
)

__all__ = ["NVFP4", "NVFP4Config", "NVFP4PerToken"]

_BLOCK = 16
_NEEDLESS = re.compile(r"\.(input_scale|input_global_scale|[kv]_scale)$")


@frozen
class NVFP4Config(ReadOrRoundConfig):
    """`quantization_config` of config.json; for a plain checkpoint, the layers to quantize."""

    group_size: int = field(default=16, validator=validators.in_((16,)))
    modules_to_not_convert: tuple[str, ...] | None = None


class NVFP4(ReadOrRound, CodedMethod):
    """e2m1 with two levels of scales."""

    name = "nvfp4"
    Config: ClassVar[type] = NVFP4Config
    config: NVFP4Config
    LISTS: ClassVar = {"modules_to_not_convert": below, "ignore": below}

    ROUNDS_TO = "nvfp4"
    HELD = ("linear", "expert")

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        if spec.input_shard.total % _BLOCK or spec.inputs % _BLOCK:
            return f"{cls.name}: {spec.inputs} inputs are not a multiple of {_BLOCK}"
        return super().rejects(spec, platform)

    def skips(self, name: str) -> bool:
        return below(name, (*(self.config.modules_to_not_convert or ()), *self.config.ignore))

    def rename(self, name: str) -> str | None:
        return None if _NEEDLESS.search(name) else name.replace(".weight_packed", ".weight")

    def scheme(self, spec: LinearSpec) -> StoredAs:
        return StoredAs(f"e2m1, an e4m3 scale per {_BLOCK} inputs", "e2m1", group=_BLOCK)

    def designed_activations(self, spec: LinearSpec) -> str:
        return "nvfp4"

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        return {
            "weight": ParamSpec((OUTPUTS, INPUTS.packed(2)), "uint8"),
            "scale": ParamSpec((OUTPUTS, INPUTS.blocks(_BLOCK)), "float32", "weight_scale"),
            "times": ParamSpec((PARTS,), "float32", "weight_scale_2", optional=True),
            "over": ParamSpec((PARTS,), "float32", "weight_global_scale", optional=True),
        }

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        scale = stored["scale"]
        if "times" in stored:
            scale = scale * per_row(stored["times"], spec)
        elif "over" in stored:
            scale = scale / per_row(stored["over"], spec)
        else:
            raise CheckpointError(f"{spec.name}: weight_scale_2 or weight_global_scale is missing")
        return (Codes(nibbles(stored["weight"]), scale, levels=E2M1),)


class NVFP4PerToken(NVFP4):
    """vLLM's name for quantization at load; activations stay in 16 bits."""

    name = "nvfp4_per_token"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None
