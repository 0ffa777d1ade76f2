"""`--quantization NAME` on a plain checkpoint: weights are rounded as they load.

No calibration data is needed. Names are vLLM's and shorter ones of our own; each says what linear
layers, the head and stacks of experts become where `--quantization-config` says nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen, validators

from modulm.contracts.quantization import LinearSpec
from modulm_quantized import AtLoad, AtLoadConfig, Scheme
from modulm_quantized.rounding import SCHEMES

__all__ = [
    "ExpertsInt4",
    "ExpertsInt8",
    "FP8PerBlock",
    "FP8PerChannel",
    "FP8PerTensor",
    "Int4",
    "Int4Config",
    "Int8",
    "Int8WeightOnly",
    "Online",
]


@frozen
class Int4Config(AtLoadConfig):
    """As for the others, and `group_size`: weights along an input row that share a scale and a
    zero point."""

    group_size: int = field(default=64, validator=validators.in_((32, 64, 128, 256)))


class Int8(AtLoad):
    """A byte per weight; indistinguishable from bf16 in practice."""

    name = "int8"
    LINEAR = HEAD = EXPERT = "int8"
    ROUNDED = "int8"


class Int4(AtLoad):
    """Half a byte per weight, with a zero point per group; the head, which every token's choice
    hangs on, keeps a byte per weight, and so do inputs that are not whole groups."""

    name = "int4"
    Config: ClassVar[type] = Int4Config
    LINEAR = EXPERT = "int4"
    HEAD = "int8"
    ROUNDED = "int8"

    def rounded_to(self, spec: LinearSpec) -> Scheme | None:
        found = super().rounded_to(spec)
        asked = self._requested_scheme(spec)
        if found is None and asked is not None and asked.values == "int4":
            return SCHEMES["int8"]
        return found

    def note(self, spec: LinearSpec) -> str | None:
        note, asked = super().note(spec), self._requested_scheme(spec)
        if spec.kind == "lm_head" and asked == SCHEMES["int8"]:
            return f"{note}: the head keeps int8, every token's choice hangs on it"
        unfit = asked.unfit(spec.inputs) if asked else None
        return f"{note}: {unfit}" if unfit else note


class ExpertsInt8(Int8):
    """Stacks of experts in int8; what every token passes through stays as it is."""

    name = "experts_int8"
    LINEAR = HEAD = ""


class ExpertsInt4(Int4):
    """Stacks of experts in int4; what every token passes through stays as it is."""

    name = "experts_int4"
    LINEAR = HEAD = ""


class Int8WeightOnly(AtLoad):
    """vLLM's name for experts in int8 under activations that are not rounded."""

    name = "int8_per_channel_weight_only"
    EXPERT = "int8_per_channel_weight_only"


class FP8PerTensor(AtLoad):
    """e4m3, one scale for each layer, and for each part of a fused one."""

    name = "fp8_per_tensor"
    LINEAR = EXPERT = "fp8_per_tensor"


class FP8PerChannel(AtLoad):
    """e4m3, a scale per output."""

    name = "fp8_per_channel"
    LINEAR = EXPERT = "fp8_per_channel"


class FP8PerBlock(AtLoad):
    """e4m3, a scale for each 128 outputs and 128 inputs."""

    name = "fp8_per_block"
    LINEAR = EXPERT = "fp8_per_block"


class Online(AtLoad):
    """Nothing by itself: `--quantization-config` names the schemes."""

    name = "online"
    EXAMPLE: ClassVar[Mapping[str, object]] = {"global_scheme": "int8"}
