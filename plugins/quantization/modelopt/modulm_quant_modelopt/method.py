"""ModelOpt checkpoints, whose formats are called "algorithms".

FP8: `weight` e4m3 and `weight_scale`, one per fused part, per output, or per block of 128 x 128.
MXFP8: scales are exponents of 2 plus 127, per 32 inputs. NVFP4: `weight` [N, K / 2] e2m1, two per
byte with the even k in the low half; `weight_scale` e4m3 per 16 inputs, and `weight_scale_2` per
fused part. MXFP4: `weight` as in NVFP4, scales as in MXFP8. W8A16 and W8A8: int8 with a scale per
output. Settings are in config.json or, in older versions, in hf_quant_config.json. Source:
modelopt/torch/export of nvidia-modelopt 0.47.

Activations are not rounded, so their stored scales are not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
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
    native_lists,
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
    """What an algorithm stores: the dtype of codes, and what shares a scale.

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


#: Algorithms that quantize activations, and to what; scales are computed per token.
_ACTIVATIONS = {
    "FP8": "fp8_token",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_token",
    "FP8_PB_REAL": "fp8",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp8",
    "W8A8_SQ_PER_CHANNEL": "int8",
}


@frozen
class ModelOptConfig:
    """`quantization` of hf_quant_config.json, or the same settings in config.json.

    `quantized_layers` has the algorithm of each layer if they are mixed.
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "modelopt"
    quant_algo: str = ""
    ignore: tuple[str, ...] | None = None
    exclude_modules: tuple[str, ...] | None = None
    quantized_layers: dict[str, dict[str, Any]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        algorithms = {str(one.get("quant_algo")) for one in self.quantized_layers.values()}
        algorithms |= {self.quant_algo} - {_MIXED, ""}
        unknown = sorted(algo for algo in algorithms if algo.upper() not in _FORMS)
        if unknown:
            raise ValueError(f"quant_algo: {unknown[0]!r}; supported: {', '.join(_FORMS)}")


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
            return f"found {_FILE}"
        return None

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, Any]:
        lists = dict.fromkeys(("ignore", "exclude_modules"), _covered)
        return native_lists(checkpoint, cls._stored_settings(checkpoint), lists)

    @classmethod
    def _stored_settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, Any]:
        table = dict(checkpoint.quantization or {})
        if table.get("quant_algo") or checkpoint.folder is None:
            return table
        file = checkpoint.folder / _FILE
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))["quantization"]
        except FileNotFoundError:
            return table
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: must have a table `quantization`: {error}") from error
        if not isinstance(settings, dict):
            raise CheckpointError(f"{file}: quantization: must be a table")
        return {**table, **settings}

    def skips(self, name: str) -> bool:
        unlisted = bool(self.config.quantized_layers) and self._algorithm(name) is None
        return unlisted or self.skips_fused(name)

    def skips_fused(self, name: str) -> bool:
        listed = (self.config.ignore or ()) + (self.config.exclude_modules or ())
        return _covered(name, listed)

    def rename(self, name: str) -> str | None:
        return None if _NEEDLESS.search(name) else name

    def designed_activations(self, spec: LinearSpec) -> str:
        return _ACTIVATIONS.get(self._of(spec)[0], "bf16")

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
        params = {
            "weight": ParamSpec((OUTPUTS, axis), form.codes),
            "scale": ParamSpec(self._axes(spec, form), scale, "weight_scale"),
        }
        if form.codes == "uint8" and not form.exponents:
            params["every"] = ParamSpec((PARTS,), "float32", "weight_scale_2")
        return params

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
        """Return the axes of scales. Raises ConfigError if the inputs are not a multiple of the
        group size.
        """
        scope, total = form.scope, spec.input_shard.total
        if scope == "tensor":
            return (PARTS,)
        if scope == "output":
            return (OUTPUTS, fixed(1))
        if scope == "block":
            return (OUTPUTS.blocks(_BLOCK), INPUTS.blocks(_BLOCK))
        size = int(scope)
        if total % size or spec.inputs % size:
            raise ConfigError(
                "quantization_config.quant_algo",
                f"{spec.name} has {spec.inputs} inputs, not a multiple of the group size {size}",
            )
        return (OUTPUTS, INPUTS.blocks(size))

    def _of(self, spec: LinearSpec) -> tuple[str, _Form]:
        """Return the algorithm of a layer. Raises ConfigError if fused parts differ."""
        names = spec.part_names or (spec.name,)
        algorithms = {self._algorithm(name) for name in names}
        algorithm = algorithms.pop()
        if not algorithms and not algorithm:
            raise ConfigError("quantization_config.quant_algo", "missing")
        if algorithms or not algorithm:
            listed = ", ".join(names)
            raise ConfigError(
                "quantization_config.quantized_layers",
                f"{listed}: fused layers have different settings",
            )
        return algorithm, _FORMS[algorithm]

    def _algorithm(self, name: str) -> str | None:
        layers = self.config.quantized_layers
        if not layers:
            return self.config.quant_algo.upper() or None
        settings = layers.get(name)
        if settings is None:
            # The experts of a layer may share one entry.
            settings = next((one for path, one in layers.items() if _covers(path, name)), None)
        return None if settings is None else str(settings["quant_algo"]).upper()


class ModelOptFP4(ModelOpt):
    """vLLM's name for NVFP4 checkpoints on the command line."""

    name = "modelopt_fp4"


class ModelOptMXFP8(ModelOpt):
    """vLLM's name for MXFP8 checkpoints on the command line."""

    name = "modelopt_mxfp8"


class ModelOptMixed(ModelOpt):
    """vLLM's name for checkpoints with mixed algorithms on the command line."""

    name = "modelopt_mixed"


def _covered(name: str, patterns: Iterable[str]) -> bool:
    return any(_covers(pattern, name) for pattern in patterns)


def _covers(pattern: str, name: str) -> bool:
    """Whether a path, which may have wildcards, is the layer's or that of a parent module."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
