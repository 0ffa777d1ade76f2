"""torchao checkpoints, as the library flattens its tensors into safetensors files.

The components of a quantized `weight` are called `_weight_qdata`, `_weight_scale` and so on. int8:
[N, K] with scales [N, K / group] and optional zero points, also for codes of fewer bits. float8:
e4m3 with scales per tensor, per output or per block. int4 "plain": qdata [N, K / 2], signed, with
the even k in the low half, scales and zero points [K / group, N]. int4 "tile_packed_to_4d": qdata
[N / 8, K / 128, 32, 4], words in the order of tensor cores, padded to whole tiles, and
`_weight_scale_and_zero` [K / group, N, 2]. Zero points of int4 are added after scaling. Source:
flatten_tensor_state_dict and quantize_/workflows of torchao 0.18; tiles: Bint4 layout of PyTorch's
int4mm.cu.

int8 activations are multiplied as integers, with a scale per token and 256 inputs. Others are not
rounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    PARTS,
    LinearSpec,
    ParamSpec,
    fixed,
)
from modulm.errors import ConfigError
from modulm_quant_torchao.tiles import from_tiles, tiled_axes
from modulm_quantized import (
    CodedMethod,
    Codes,
    StoredAs,
    block_columns,
    block_grid,
    matches,
    nibbles,
    per_row,
)

__all__ = ["TorchAO", "TorchAOConfig"]

_INT8 = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8StaticActivationInt8WeightConfig",
)
_INTX = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
_FLOAT8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
_INT4 = ("Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig")
_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
_NEEDLESS = re.compile(r"\._weight_act_quant_(scale|zero_point)$")


@frozen
class _Form:
    """How a layer is stored.

    kind: "int8", "intx", "float8", "int4" or "tiles". group: inputs per scale, 0 for all. block:
    outputs and inputs per scale. whole: one scale for the tensor.
    """

    kind: str
    group: int = 0
    block: tuple[int, int] | None = None
    whole: bool = False
    integers: bool = False


@frozen
class TorchAOConfig:
    """`quantization_config` of config.json: a configuration of the library as JSON."""

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "torchao"
    quant_type: Any = field(factory=dict)
    modules_to_not_convert: tuple[str, ...] | None = None
    include_input_output_embeddings: bool = False

    def __attrs_post_init__(self) -> None:
        if isinstance(self.quant_type, str):
            raise ValueError(
                f"quant_type: {self.quant_type!r}: must be a table (torchao 0.10 or later)"
            )

    def of(self, name: str) -> Mapping[str, Any] | None:
        """Return the configuration of a layer. Raises ConfigError."""
        table = self.quant_type.get("default", {})
        if table.get("_type") not in _BY_NAME:
            return table or None
        data = table.get("_data", {})
        by_name = data.get("fqn_to_config") or data.get("module_fqn_to_config") or {}
        for key in (f"{name}.weight", name):
            if key in by_name:
                return by_name[key]  # type: ignore[no-any-return]
        for pattern, one in by_name.items():
            expression = pattern[3:] if pattern.startswith("re:") else None
            if expression and any(re.fullmatch(expression, n) for n in (f"{name}.weight", name)):
                return one  # type: ignore[no-any-return]
        return by_name.get("_default")


class TorchAO(CodedMethod):
    """Integers of 1 to 8 bits and fp8, mixed by layer."""

    name = "torchao"
    Config: ClassVar[type] = TorchAOConfig
    EXAMPLE: ClassVar[Mapping[str, object]] = {
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}
    }
    config: TorchAOConfig
    LISTS: ClassVar = {"modules_to_not_convert": matches}
    HELD = ("linear", "expert")

    def skips(self, name: str) -> bool:
        return self.skips_fused(name) or self.config.of(name) is None

    def skips_fused(self, name: str) -> bool:
        return matches(name, self.config.modules_to_not_convert or ())

    def rename(self, name: str) -> str | None:
        return None if _NEEDLESS.search(name) else name

    def designed_activations(self, spec: LinearSpec) -> str:
        return "int8" if self._form(spec).integers else "bf16"

    def scheme(self, spec: LinearSpec) -> StoredAs:
        form = self._form(spec)
        if form.kind == "float8":
            where = f"{form.group} inputs" if form.group else "tensor" if form.whole else "output"
            where = "block of {} outputs and {} inputs".format(*form.block) if form.block else where
            group = block_columns(spec, form.block[1]) if form.block else form.group
            return StoredAs(f"e4m3, a scale per {where}", "fp8", 8, group)
        if form.kind in ("int8", "intx"):
            return StoredAs.integers(8, form.group, zeros=form.kind == "intx")
        return StoredAs.integers(4, form.group, zeros=True)

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        form = self._form(spec)
        groups = self._groups(spec, form)
        if form.kind == "tiles":
            axes, unpack = tiled_axes(spec), from_tiles(spec)
            total = spec.input_shard.total
            pair = ParamSpec(
                (groups, OUTPUTS, fixed(2)),
                "float32",
                "_weight_scale_and_zero",
                transform=lambda t: t[: total // form.group],
            )
            return {
                "codes": ParamSpec(axes, "uint8", "_weight_qdata", transform=unpack),
                "pair": pair,
            }
        if form.kind == "int4":
            halves = lambda t: t.view(torch.uint8)  # noqa: E731
            return {
                "codes": ParamSpec(
                    (OUTPUTS, INPUTS.packed(2)), "uint8", "_weight_qdata", transform=halves
                ),
                "scale": ParamSpec((groups, OUTPUTS), "float32", "_weight_scale"),
                "added": ParamSpec((groups, OUTPUTS), "float32", "_weight_zero_point"),
            }
        dtype = "float8_e4m3fn" if form.kind == "float8" else "int8"
        axes = (PARTS,) if form.whole else (OUTPUTS, groups)
        if form.block:
            axes = (OUTPUTS.blocks(form.block[0]), INPUTS.blocks(form.block[1]))
        params = {
            "codes": ParamSpec((OUTPUTS, INPUTS), dtype, "_weight_qdata"),
            "scale": ParamSpec(axes, "float32", "_weight_scale"),
        }
        if dtype == "int8":
            needed = form.kind == "intx"
            params["zeros"] = ParamSpec(axes, "float32", "_weight_zero_point", optional=not needed)
        return params

    def example(self, spec: LinearSpec, name: str) -> Tensor | None:
        if name == "codes" and self._form(spec).kind == "tiles":
            return torch.arange(spec.inputs) % 16
        return torch.zeros(()) if name == "zeros" else None

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        form, values = self._form(spec), stored["codes"]
        if form.kind == "tiles":
            scale, added = (one.T.contiguous() for one in stored["pair"].unbind(-1))
            return (Codes(values, scale, 8 - added / scale),)
        if form.kind == "int4":
            scale, added = stored["scale"].T.contiguous(), stored["added"].T.contiguous()
            return (Codes(nibbles(values) ^ 8, scale, 8 - added / scale),)
        scale, zeros = stored["scale"], stored.get("zeros")
        if form.whole:
            scale = per_row(scale, spec)
            zeros = None if zeros is None else per_row(zeros, spec)
        if form.block:
            scale = block_grid(scale, spec, *form.block)
        if zeros is not None and not bool(zeros.any()):
            zeros = None
        return (Codes(values, scale, zeros),)

    def _groups(self, spec: LinearSpec, form: _Form) -> Any:
        """Return the axis of groups of inputs. Raises ConfigError if the inputs are not a multiple
        of the group size.
        """
        size, total = form.group, spec.input_shard.total
        if not size:
            return fixed(1)
        if total % size or spec.inputs % size:
            raise ConfigError(
                "quantization_config.quant_type",
                f"{spec.name} has {spec.inputs} inputs, not a multiple of the group size {size}",
            )
        return INPUTS.blocks(size)

    def _form(self, spec: LinearSpec) -> _Form:
        """Return how a layer is stored. Raises ConfigError if fused parts differ."""
        names = spec.part_names or (spec.name,)
        forms = {_form_of(self.config.of(name) or {}) for name in names}
        form = forms.pop()
        if forms:
            listed = ", ".join(names)
            raise ConfigError(
                "quantization_config.quant_type", f"{listed}: fused layers have different settings"
            )
        return form


def _form_of(table: Mapping[str, Any]) -> _Form:
    """Return what a configuration stores. Raises ConfigError if it is not supported."""
    kind, data = str(table.get("_type")), table.get("_data") or {}
    if kind in _INT4:
        packing = data.get("int4_packing_format") or "plain"
        packing = str(packing.get("_data", packing) if isinstance(packing, dict) else packing)
        forms = {"plain": "int4", "tile_packed_to_4d": "tiles"}
        if packing.lower() not in forms:
            raise ConfigError(
                "quantization_config.quant_type",
                f"int4_packing_format: {packing!r}; supported: {', '.join(forms)}",
            )
        return _Form(forms[packing.lower()], int(data.get("group_size") or 128))
    forms = {**dict.fromkeys(_INT8, "int8"), **dict.fromkeys(_INTX, "intx")}
    forms |= dict.fromkeys(_FLOAT8, "float8")
    if kind not in forms:
        known = ", ".join((*_INT4, *forms))
        raise ConfigError("quantization_config.quant_type", f"{kind!r}; supported: {known}")
    size, block, whole = _scope(data)
    packing = data.get("intx_packing_format") or "unpacked_to_int8"
    packing = str(packing.get("_data", packing) if isinstance(packing, dict) else packing)
    if packing.lower() != "unpacked_to_int8":
        raise ConfigError("quantization_config.quant_type", f"intx_packing_format: {packing!r}")
    return _Form(forms[kind], size, block, whole, integers="ActivationInt" in kind)


def _scope(data: Mapping[str, Any]) -> tuple[int, tuple[int, int] | None, bool]:
    """Return the group size, the block, and whether a tensor has one scale."""
    granularity = data.get("weight_granularity") or data.get("granularity")
    if isinstance(granularity, list):
        granularity = granularity[-1]
    if not isinstance(granularity, Mapping):
        return int(data.get("group_size") or 0), None, False
    kind, settings = granularity.get("_type"), granularity.get("_data") or {}
    if kind == "PerGroup":
        return int(settings["group_size"]), None, False
    if kind == "PerBlock":
        rows, columns = settings["block_size"]
        return (int(columns), None, False) if rows == 1 else (0, (int(rows), int(columns)), False)
    if kind in ("PerRow", "PerAxis"):
        return 0, None, False
    if kind == "PerTensor":
        return 0, None, True
    raise ConfigError("quantization_config.quant_type", f"granularity: {kind!r} is not supported")
