"""Checkpoints of ModelOpt, which names its formats "algorithms".

FP8: `weight` e4m3 and `weight_scale`, one for each fused part, or each output, or each block of
128 x 128. MXFP8: scales are exponents of 2 plus 127, for 32 inputs. NVFP4: `weight` [N, K / 2]
e2m1, two to a byte, the even k in the low half; `weight_scale` e4m3 for 16 inputs and
`weight_scale_2` for each fused part. MXFP4: `weight` as there, scales as those of MXFP8. W8A16 and
W8A8: int8 with a scale for each output. Settings lie in config.json or, by older versions, in
hf_quant_config.json. Source: modelopt/torch/export of nvidia-modelopt 0.47.

Activations are not rounded, so that stored scales of them are not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    Axis,
    CheckpointInfo,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm.errors import CheckpointError, ConfigError
from modulm_quantized import (
    E2M1,
    CodedMethod,
    Codes,
    StoredAs,
    block_columns,
    block_grid,
    nibbles,
    per_row,
)

__all__ = ["ModelOpt", "ModelOptConfig", "ModelOptFP4", "ModelOptMXFP8", "ModelOptMixed"]

_FILE = "hf_quant_config.json"
_MIXED = "MIXED_PRECISION"
_BLOCK = 128
_NEEDLESS = re.compile(r"\.(input_scale|(q|k|v|k_bmm|v_bmm|prob)_scale|.*_quantizer\._amax)$")


@frozen
class _Form:
    """What an algorithm stores: dtype of the codes, and what shares a scale.

    scope: "tensor" (a fused part), "output", "block", or a number of inputs.
    """

    codes: str
    scope: str | int
    exponents: bool = False


_FORMS = {
    "FP8": _Form("float8_e4m3fn", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": _Form("float8_e4m3fn", "output"),
    "FP8_PB_WO": _Form("float8_e4m3fn", "block"),
    "FP8_PB_REAL": _Form("float8_e4m3fn", "block"),
    "MXFP8": _Form("float8_e4m3fn", 32, exponents=True),
    "NVFP4": _Form("uint8", 16),
    "W4A16_NVFP4": _Form("uint8", 16),
    "W4A8_NVFP4_FP8": _Form("uint8", 16),
    "MXFP4": _Form("uint8", 32, exponents=True),
    "W4A8_MXFP4_FP8": _Form("uint8", 32, exponents=True),
    "W8A16": _Form("int8", "output"),
    "W8A8_SQ_PER_CHANNEL": _Form("int8", "output"),
}


@frozen
class ModelOptConfig:
    """`quantization` of hf_quant_config.json, or what config.json has of it.

    `quantized_layers` says the algorithm of each layer where they are mixed.
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "modelopt"
    quant_algo: str = ""
    ignore: tuple[str, ...] | None = None
    exclude_modules: tuple[str, ...] | None = None
    quantized_layers: dict[str, dict[str, Any]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        said = {str(one.get("quant_algo")) for one in self.quantized_layers.values()}
        said |= {self.quant_algo} - {_MIXED, ""}
        unknown = sorted(algo for algo in said if algo.upper() not in _FORMS)
        if unknown:
            raise ValueError(f"quant_algo: {unknown[0]!r}; read are {', '.join(_FORMS)}")


class ModelOpt(CodedMethod):
    """fp8, MXFP8, NVFP4, MXFP4 and int8, mixed by layer."""

    name = "modelopt"
    Config: ClassVar[type] = ModelOptConfig
    EXAMPLE: ClassVar[Mapping[str, object]] = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    config: ModelOptConfig

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        if cls.name != "modelopt":
            return None
        table = checkpoint.quantization or {}
        if str(table.get("quant_method", "")).startswith("modelopt"):
            return f"config.json says quant_method {table['quant_method']}"
        if not table and _FILE in checkpoint.files:
            return f"there is {_FILE}"
        return None

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, Any]:
        table = dict(checkpoint.quantization or {})
        if table.get("quant_algo") or checkpoint.folder is None:
            return table
        file = checkpoint.folder / _FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["quantization"]
        except FileNotFoundError:
            return table
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: a table `quantization` is needed: {error}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{file}: quantization: a table is needed")
        return {**table, **found}

    def skips(self, name: str) -> bool:
        unlisted = bool(self.config.quantized_layers) and self._algorithm(name) is None
        return unlisted or self.skips_fused(name)

    def skips_fused(self, name: str) -> bool:
        listed = (self.config.ignore or ()) + (self.config.exclude_modules or ())
        return any(_covers(pattern, name) for pattern in listed)

    def rename(self, name: str) -> str | None:
        return None if _NEEDLESS.search(name) else name

    def activations(self, spec: LinearSpec) -> str:
        algorithm = self._of(spec)[0]
        if algorithm.startswith("FP8") and not algorithm.endswith("WO"):
            return self.fp8_activations(spec)
        return "int8" if algorithm.startswith("W8A8") else "bf16"

    def scheme(self, spec: LinearSpec) -> StoredAs:
        algorithm, form = self._of(spec)
        size = form.scope if isinstance(form.scope, int) else 0
        what = f"{size} inputs" if size else f"{form.scope}"
        kind = {"uint8": "e2m1", "int8": "int"}.get(form.codes, "fp8")
        bits = 4 if kind == "e2m1" else 8
        group = block_columns(spec, _BLOCK) if form.scope == "block" else size
        text = f"{algorithm}, a scale per {what}"
        return StoredAs(text, kind, bits, group, powers=form.exponents)

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        form = self._of(spec)[1]
        axis = INPUTS.packed(2) if form.codes == "uint8" else INPUTS
        scale = "uint8" if form.exponents else "float32"
        found = {
            "weight": ParamSpec((OUTPUTS, axis), form.codes),
            "scale": ParamSpec(self._axes(spec, form), scale, "weight_scale"),
        }
        if form.codes == "uint8" and not form.exponents:
            found["every"] = ParamSpec((PARTS,), "float32", "weight_scale_2")
        return found

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        form, scale = self._of(spec)[1], stored["scale"]
        if form.exponents:
            scale = torch.exp2(scale.float() - 127)
        if form.scope == "tensor":
            scale = per_row(scale, spec)
        elif form.scope == "block":
            scale = block_grid(scale, spec, _BLOCK, _BLOCK)
        if "every" in stored:
            scale = scale * per_row(stored["every"], spec)
        if form.codes == "uint8":
            return (Codes(nibbles(stored["weight"]), scale, levels=E2M1),)
        return (Codes(stored["weight"], scale),)

    def _axes(self, spec: LinearSpec, form: _Form) -> tuple[Axis, ...]:
        """Raises ConfigError where groups do not come out even."""
        scope, whole = form.scope, spec.input_shard.whole
        if scope == "tensor":
            return (PARTS,)
        if scope == "output":
            return (OUTPUTS, fixed(1))
        if scope == "block":
            return (OUTPUTS.blocks(_BLOCK), INPUTS.blocks(_BLOCK))
        size = int(scope)
        if whole % size or spec.inputs % size:
            raise ConfigError(
                "quantization_config.quant_algo",
                f"{spec.name} has {spec.inputs} inputs, which are not whole groups of {size}",
            )
        return (OUTPUTS, INPUTS.blocks(size))

    def _of(self, spec: LinearSpec) -> tuple[str, _Form]:
        """The algorithm of a layer. Raises ConfigError where fused parts differ."""
        names = spec.part_names or (spec.name,)
        found = {self._algorithm(name) for name in names}
        algorithm = found.pop()
        if not found and not algorithm:
            raise ConfigError("quantization_config.quant_algo", "is needed")
        if found or not algorithm:
            listed = ", ".join(names)
            raise ConfigError(
                "quantization_config.quantized_layers", f"{listed}: not alike, and fused"
            )
        return algorithm, _FORMS[algorithm]

    def _algorithm(self, name: str) -> str | None:
        layers = self.config.quantized_layers
        if not layers:
            return self.config.quant_algo.upper() or None
        found = layers.get(name)
        if found is None:
            # The experts of a layer may be named as one.
            found = next((one for path, one in layers.items() if _covers(path, name)), None)
        return None if found is None else str(found["quant_algo"]).upper()


class ModelOptFP4(ModelOpt):
    """Called so where the command line says what the checkpoint is."""

    name = "modelopt_fp4"


class ModelOptMXFP8(ModelOpt):
    """Called so where the command line says what the checkpoint is."""

    name = "modelopt_mxfp8"


class ModelOptMixed(ModelOpt):
    """Called so where the command line says what the checkpoint is."""

    name = "modelopt_mixed"


def _covers(pattern: str, name: str) -> bool:
    """Whether a path, perhaps with stars, is the layer's or lies above it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
