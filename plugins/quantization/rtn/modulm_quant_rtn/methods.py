"""`--quantization NAME` on a plain checkpoint: weights are rounded to nearest while loading.

No calibration data is needed. Names are vLLM's, and short ones of modulm. Each sets what linear
layers, the head and experts become unless `--quantization-config` says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen, validators

from modulm.contracts.quantization import LinearKind, LinearSpec
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
    """The common settings, and `group_size`: inputs that share a scale and a zero point."""

    group_size: int = field(default=64, validator=validators.in_((32, 64, 128, 256)))


class Int8(AtLoad):
    """One byte per weight. Outputs are indistinguishable from bf16 in practice."""

    name = "int8"
    at_load_bits = 8.0
    LINEAR = HEAD = EXPERT = "int8"
    ROUNDED = "int8"


class Int4(AtLoad):
    """Half a byte per weight, with a zero point per group.

    The head keeps int8, because it decides each token; so do layers whose inputs are not a multiple
    of the group size.
    """

    name = "int4"
    at_load_bits = 4.5
    Config: ClassVar[type] = Int4Config
    LINEAR = EXPERT = "int4"
    HEAD = "int8"
    ROUNDED = "int8"

    def rounded_to(self, spec: LinearSpec) -> Scheme | None:
        scheme = super().rounded_to(spec)
        requested = self._requested_scheme(spec)
        if scheme is None and requested is not None and requested.values == "int4":
            return SCHEMES["int8"]
        return scheme

    def note(self, spec: LinearSpec) -> str | None:
        note, requested = super().note(spec), self._requested_scheme(spec)
        if spec.kind is LinearKind.LM_HEAD and requested == SCHEMES["int8"]:
            return f"{note}: the head keeps int8, because it decides each token"
        unfit = requested.unfit(spec.inputs) if requested else None
        return f"{note}: {unfit}" if unfit else note


class ExpertsInt8(Int8):
    """Quantizes experts to int8 and nothing else."""

    name = "experts_int8"
    at_load_bits = 0.0
    LINEAR = HEAD = ""


class ExpertsInt4(Int4):
    """Quantizes experts to int4 and nothing else."""

    name = "experts_int4"
    at_load_bits = 0.0
    LINEAR = HEAD = ""


class Int8WeightOnly(AtLoad):
    """vLLM's name for experts in int8 with unrounded activations."""

    name = "int8_per_channel_weight_only"
    EXPERT = "int8_per_channel_weight_only"


class FP8PerTensor(AtLoad):
    """e4m3, one scale per layer, or per part of a fused layer."""

    name = "fp8_per_tensor"
    LINEAR = EXPERT = "fp8_per_tensor"


class FP8PerChannel(AtLoad):
    """e4m3, a scale per output."""

    name = "fp8_per_channel"
    LINEAR = EXPERT = "fp8_per_channel"


class FP8PerBlock(AtLoad):
    """e4m3, a scale per block of 128 outputs and 128 inputs."""

    name = "fp8_per_block"
    LINEAR = EXPERT = "fp8_per_block"


class Online(AtLoad):
    """No default scheme: `--quantization-config` sets the schemes."""

    name = "online"
    EXAMPLE: ClassVar[Mapping[str, object]] = {"global_scheme": "int8"}
