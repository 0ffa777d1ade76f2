"""Quark checkpoints in its own format (`quant_method` "quark").

fp8 and int8: `weight` [N, K] and `weight_scale` per fused part or per output. Groups of integers
are transposed: `weight` [K, N] int8, or [K, N / 8] with eight 4-bit codes per word (columns 0, 2,
4, 6, 1, 3, 5, 7 from the lowest bits up if `pack_method` is "reorder"), `weight_scale` [K / group,
N] and optionally `weight_zero_point` in the form of the weights. fp4: `weight` [N, K / 2] e2m1 with
the even k in the low half, with exponents of 2 plus 127 per 32 inputs (MXFP4), or e4m3 scales with
a second scale `weight_scale_2` (NVFP4). Source: quark/torch/export and quark/torch/utils/pack.py of
amd-quark 0.13.

int8 activations are multiplied as integers, with a scale per token and 256 inputs. Others are not
rounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    CheckpointInfo,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm.errors import ConfigError
from modulm.structure import Problem, structure_table
from modulm_quantized import (
    E2M1,
    CodedMethod,
    Codes,
    StoredAs,
    native_lists,
    nibbles,
    packed_axis,
    per_row,
    unpack_words,
)

__all__ = ["Quark", "QuarkConfig", "Weights"]

_NEEDLESS = re.compile(
    r"\.((input|output|bias|q|k|v|prob)_(scale|zero_point)|(k|v)_proj\.output_scale)$"
)
_KEPT = {"fp8_e4m3": "float8_e4m3fn", "int8": "int8"}
_PACKED = ("int4", "uint4")
_DTYPES = (*_KEPT, *_PACKED, "fp4")
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@frozen
class Weights:
    """The `weight` entry of a layer's settings."""

    OPEN_ENDED: ClassVar[bool] = True

    dtype: str = field(validator=validators.in_(_DTYPES))
    qscheme: str = field(
        default="per_tensor", validator=validators.in_(("per_tensor", "per_channel", "per_group"))
    )
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = True
    scale_format: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.qscheme == "per_group" and (self.group_size or 0) < 1:
            raise ValueError(f"group_size: must be positive for per_group, not {self.group_size}")
        if self.dtype == "fp4" and self.qscheme != "per_group":
            raise ValueError("qscheme: must be per_group for fp4")
        if self.dtype == "fp8_e4m3" and self.qscheme == "per_group":
            raise ValueError("qscheme: per_group is not supported for fp8")
        if self.dtype in _PACKED and self.qscheme != "per_group":
            raise ValueError(f"qscheme: must be per_group for {self.dtype}")

    @property
    def exponents(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale_format == "e8m0"

    @property
    def zeros(self) -> bool:
        """Whether there are zero points."""
        return self.dtype in (*_PACKED, "int8") and not self.symmetric


@frozen
class QuarkConfig:
    """`quantization_config` of config.json: settings for all layers, per pattern, and
    exclusions.
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "quark"
    global_quant_config: dict[str, Any] = field(factory=dict)
    layer_quant_config: dict[str, dict[str, Any]] = field(factory=dict)
    layer_type_quant_config: dict[str, dict[str, Any]] = field(factory=dict)
    exclude: tuple[str, ...] | None = None
    export: dict[str, Any] = field(factory=dict)

    def of(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a layer."""
        for pattern, table in self.layer_quant_config.items():
            if _matches(pattern, name):
                return table
        return self.layer_type_quant_config.get("Linear", self.global_quant_config)


class Quark(CodedMethod):
    """fp8, int8, int4, MXFP4 and NVFP4, mixed by layer."""

    name = "quark"
    Config: ClassVar[type] = QuarkConfig
    EXAMPLE: ClassVar[Mapping[str, object]] = {
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}
    }
    config: QuarkConfig

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, Any]:
        return native_lists(checkpoint, checkpoint.quantization or {}, {"exclude": _excluded})

    def skips(self, name: str) -> bool:
        return self.skips_fused(name) or not self.config.of(name).get("weight")

    def skips_fused(self, name: str) -> bool:
        return _excluded(name, self.config.exclude or ())

    def rename(self, name: str) -> str | None:
        return None if _NEEDLESS.search(name) else name

    def designed_activations(self, spec: LinearSpec) -> str:
        inputs = self.config.of((spec.part_names or (spec.name,))[0]).get("input_tensors") or {}
        tables = inputs if isinstance(inputs, list) else [inputs]
        numbers, weights = tables[0].get("dtype"), self._weights(spec)
        if numbers == "int8":
            return "int8"
        if weights.dtype == "fp8_e4m3":
            return "fp8_token" if numbers == "fp8_e4m3" else "bf16"
        if weights.dtype != "fp4":
            return "bf16"
        if not weights.exponents:
            return "nvfp4" if numbers == "fp4" and weights.group_size == 16 else "bf16"
        return {"fp4": "mxfp4", "fp8_e4m3": "mxfp8"}.get(str(numbers), "bf16")

    def scheme(self, spec: LinearSpec) -> StoredAs:
        weights = self._weights(spec)
        size = weights.group_size or 0 if weights.qscheme == "per_group" else 0
        if weights.dtype != "fp4" and weights.dtype != "fp8_e4m3":
            return StoredAs.integers(8 if weights.dtype == "int8" else 4, size, zeros=weights.zeros)
        where = f"{size} inputs" if size else weights.qscheme.removeprefix("per_")
        kind = "e2m1" if weights.dtype == "fp4" else "fp8"
        text = f"{weights.dtype}, a scale per {where}"
        return StoredAs(text, kind, group=size, powers=weights.exponents)

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        weights = self._weights(spec)
        if weights.qscheme == "per_group":
            return self._grouped(spec, weights)
        axes = (PARTS,) if weights.qscheme == "per_tensor" else (OUTPUTS, fixed(1))
        scale = ParamSpec(axes, "float32", "weight_scale")
        params = {"weight": ParamSpec((OUTPUTS, INPUTS), _KEPT[weights.dtype]), "scale": scale}
        if weights.dtype == "int8":
            zeros = ParamSpec(
                axes, "float32", "weight_zero_point", optional=weights.symmetric is True
            )
            params["zeros"] = zeros
        return params

    def _grouped(self, spec: LinearSpec, weights: Weights) -> Mapping[str, ParamSpec]:
        """Return the parameters of grouped codes. Raises ConfigError if the inputs are not a
        multiple of the group size.
        """
        size, total = weights.group_size or 0, spec.input_shard.total
        if total % size or spec.inputs % size:
            raise ConfigError(
                "quantization_config.group_size",
                f"{spec.name} has {spec.inputs} inputs, not a multiple of the group size {size}",
            )
        groups = INPUTS.blocks(size)
        if weights.dtype == "fp4":
            params = {
                "weight": ParamSpec((OUTPUTS, INPUTS.packed(2)), "uint8"),
                "scale": ParamSpec(
                    (OUTPUTS, groups), "uint8" if weights.exponents else "float32", "weight_scale"
                ),
            }
            if self._nested(spec):
                params["every"] = ParamSpec((PARTS,), "float32", "weight_scale_2")
            return params
        packed = weights.dtype in _PACKED
        outputs, dtype = (packed_axis(OUTPUTS, 4), "int32") if packed else (OUTPUTS, "int8")
        zeros = ParamSpec((groups, outputs), dtype, "weight_zero_point", optional=not weights.zeros)
        return {
            "weight": ParamSpec((INPUTS, outputs), dtype),
            "scale": ParamSpec((groups, OUTPUTS), "float32", "weight_scale"),
            "zeros": zeros,
        }

    def example(self, spec: LinearSpec, name: str) -> Tensor | None:
        signed = self._weights(spec).dtype.startswith("int")
        return torch.zeros(()) if name == "zeros" and signed else None

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        weights, scale, zeros = self._weights(spec), stored["scale"], stored.get("zeros")
        if weights.dtype == "fp4":
            if weights.exponents:
                scale = torch.exp2(scale.float() - 127)
            if "every" in stored:
                scale = scale * per_row(stored["every"], spec)
            return (Codes(nibbles(stored["weight"]), scale, levels=E2M1),)
        if weights.qscheme == "per_group":
            return (self._columns(stored, weights),)
        if weights.qscheme == "per_tensor":
            scale = per_row(scale, spec)
            zeros = None if zeros is None else per_row(zeros, spec)
        if zeros is not None and not bool(zeros.any()):
            zeros = None
        return (Codes(stored["weight"], scale, zeros),)

    def _columns(self, stored: Mapping[str, Tensor], weights: Weights) -> Codes:
        """Return the codes of grouped integers, which are stored input by input."""
        scale, zeros = stored["scale"].T.contiguous(), stored.get("zeros")
        if weights.dtype == "int8":
            plain = None if zeros is None else zeros.T.contiguous()
            return Codes(stored["weight"].T.contiguous(), scale, plain)
        order = _ORDER if self.config.export.get("pack_method", "reorder") == "reorder" else None
        flip = 8 if weights.dtype == "int4" else 0
        values = unpack_words(stored["weight"], 4, 1, order).T.contiguous() ^ flip
        points = torch.full_like(scale, flip)
        if zeros is not None:
            points = (unpack_words(zeros, 4, 1, order).T.contiguous() ^ flip).to(scale.dtype)
        return Codes(values, scale, points)

    def _nested(self, spec: LinearSpec) -> bool:
        """Whether scales have a second scale."""
        weight = self.config.of((spec.part_names or (spec.name,))[0]).get("weight")
        return isinstance(weight, list) and len(weight) == 2

    def _weights(self, spec: LinearSpec) -> Weights:
        """Return how a layer's weights are stored. Raises ConfigError if fused parts differ."""
        names = spec.part_names or (spec.name,)
        forms = {self._of(name) for name in names}
        weights = forms.pop()
        if forms:
            listed = ", ".join(names)
            raise ConfigError(
                "quantization_config", f"{listed}: fused layers have different settings"
            )
        return weights

    def _of(self, name: str) -> Weights:
        weight = self.config.of(name).get("weight") or {}
        tables: list[dict[str, Any]] = weight if isinstance(weight, list) else [weight]
        nested = [bool(table.get("is_scale_quant")) for table in tables[1:]]
        if len(tables) > 2 or not all(nested):
            raise ConfigError(
                "quantization_config.weight",
                f"{name}: nested quantization is not supported: {weight}",
            )
        try:
            return structure_table(tables[0], Weights, open_ended=True)
        except Problem as problem:
            raise ConfigError("quantization_config.weight", f"{name}: {problem}") from problem


def _excluded(name: str, patterns: Iterable[str]) -> bool:
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches the layer: a regular expression after "re:", else a wildcard."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)
