"""AWQ checkpoints (Lin et al., arXiv 2306.00978), as AutoAWQ writes them.

`qweight` holds 4-bit codes, eight per word, with a scale and a zero point per group of inputs. In
the "gemm" version, words run along outputs and hold columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest
bits up. In the "gemv" version, they run along inputs, in order, and `qzeros` and `scales` have
padding columns. Source: WQLinear_GEMM and WQLinear_GEMV of AutoAWQ 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    Axis,
    CheckpointInfo,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm.errors import ConfigError
from modulm_quantized import (
    ACTIVATIONS,
    CodedMethod,
    Codes,
    StoredAs,
    below,
    packed_axis,
    unpack_words,
)

__all__ = ["AWQ", "AWQConfig", "AWQMarlin", "AutoAWQ"]

_BITS = 4
#: AutoRound's "packing_format" for the same packing.
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round", "inc")
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: Group size -> multiple to which "gemv" rounds up the words of zero points; 1 for larger sizes.
_ROUNDED = {64: 2, 32: 4, 16: 8}


@frozen
class AWQConfig:
    """`quantization_config` of config.json.

    `activations`: what kernels round activations to, "bf16" (no rounding) or "int8". Other keys
    that AutoAWQ writes configure its own kernels.
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "awq"
    bits: int = field(default=_BITS, validator=validators.in_((_BITS,)))
    group_size: int = field(default=128)
    zero_point: bool = field(default=True, validator=validators.in_((True,)))
    version: str = field(
        default="gemm", converter=str.lower, validator=validators.in_(("gemm", "gemv"))
    )
    modules_to_not_convert: tuple[str, ...] | None = None
    activations: str = field(default="bf16", validator=validators.in_(ACTIVATIONS))

    @group_size.validator
    def _positive(self, _: object, value: int) -> None:
        if value != -1 and value < 8:
            raise ValueError(f"group_size: must be -1 (all inputs) or at least 8, not {value}")


class AWQ(CodedMethod):
    """4-bit weights with a zero point per group. The LM head is not quantized."""

    name = "awq"
    Config: ClassVar[type] = AWQConfig
    config: AWQConfig
    LISTS: ClassVar = {"modules_to_not_convert": below}
    HELD = ("linear", "expert")

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        table = checkpoint.quantization or {}
        method, packed = table.get("quant_method"), str(table.get("packing_format", ""))
        rounded = method in _AUTO_ROUND and packed.endswith("awq")
        return f"config.json says quant_method {method}" if method == cls.name or rounded else None

    def skips(self, name: str) -> bool:
        return below(name, self.config.modules_to_not_convert or ())

    def activations(self, spec: LinearSpec) -> str:
        return self.config.activations

    def scheme(self, spec: LinearSpec) -> StoredAs:
        return StoredAs.integers(_BITS, self.config.group_size, zeros=True)

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        group = self._group(spec)
        if self.config.version == "gemm":
            word_axis, groups = packed_axis(OUTPUTS, _BITS), _groups(spec, group)
            return {
                "qweight": ParamSpec((INPUTS, word_axis), "int32"),
                "qzeros": ParamSpec((groups, word_axis), "int32"),
                "scales": ParamSpec((groups, OUTPUTS), "float16"),
            }
        zeros = _zero_words(spec.input_shard.total, group)
        return {
            "qweight": ParamSpec((OUTPUTS, packed_axis(INPUTS, _BITS)), "int32"),
            "qzeros": ParamSpec((OUTPUTS, fixed(zeros)), "int32"),
            "scales": ParamSpec((OUTPUTS, fixed(8 * zeros)), "float16"),
        }

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        weight, zeros, scales = (stored[name] for name in ("qweight", "qzeros", "scales"))
        if self.config.version == "gemv":
            groups = spec.inputs // self._group(spec)
            values, points = (unpack_words(packed, _BITS, -1) for packed in (weight, zeros))
            return (Codes(values, scales[:, :groups], points[:, :groups]),)
        values, points = (unpack_words(packed, _BITS, -1, _ORDER).T for packed in (weight, zeros))
        return (Codes(values.contiguous(), scales.T.contiguous(), points.contiguous()),)

    def _group(self, spec: LinearSpec) -> int:
        """Return the group size. Raises ConfigError if the inputs are not a multiple of it."""
        total = spec.input_shard.total
        size = self.config.group_size if self.config.group_size > 0 else total
        if total % size or spec.inputs % size:
            raise ConfigError(
                "quantization_config.group_size",
                f"{spec.name} has {spec.inputs} inputs, not a multiple of the group size {size}",
            )
        return size


def _groups(spec: LinearSpec, group: int) -> Axis:
    """Return the axis of the groups of a layer's inputs."""
    return fixed(1) if group == spec.input_shard.total else INPUTS.blocks(group)


def _zero_words(inputs: int, group: int) -> int:
    """Return the words of zero points in each row of the "gemv" version."""
    multiple = _ROUNDED.get(group, 1)
    needed = -(-inputs // group // 8)
    return -(-needed // multiple) * multiple


class AutoAWQ(AWQ):
    """vLLM's name for the same method."""

    name = "auto_awq"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None


class AWQMarlin(AWQ):
    """vLLM's name for the same method."""

    name = "awq_marlin"

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None
