"""compressed-tensors checkpoints (the format of LLM Compressor), up to version 0.20.

A layer has `weight_packed` or `weight`, `weight_scale` and optionally `weight_zero_point`,
`weight_global_scale` and `weight_g_idx`. Packed integers are shifted to start at 0 and stored in
words without gaps; so are zero points, along outputs. Scales have one entry per fused part
("tensor"), [N, 1] ("channel"), [N, K / group] ("group") or [N / rows, K / columns] ("block"); those
of MX formats are exponents of 2 plus 127. A 2:4 sparse layer may be stored without its zeros, see
sparse.py. Source: compressed_tensors/compressors of the library.

Activations with an integer scheme are multiplied as integers, with a scale per token and 256
inputs. With an fp8 scheme, they are rounded if the kernels support fp8; with an fp4 scheme, they
are not. Stored scales of activations and of the KV cache are not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
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
from modulm.errors import ConfigError
from modulm_quant_compressed_tensors.marlin24 import dense_codes, plain_scales
from modulm_quant_compressed_tensors.scheme import CompressedTensorsConfig, Group, Weights
from modulm_quant_compressed_tensors.sparse import dense
from modulm_quantized import (
    E2M1,
    CodedMethod,
    Codes,
    StoredAs,
    block_columns,
    block_grid,
    matches,
    native_patterns,
    nibbles,
    packed_axis,
    per_row,
    renamed_layers,
    sorted_by_group,
    unpack_words,
)

__all__ = ["CompressedTensors"]

_NEEDLESS = re.compile(
    r"\.(weight_shape|shape|(input|output|q|k|v|prob)_(scale|zero_point|global_scale))$"
)
_NAME = "compressed-tensors"
#: Lists of names of layers in tables of settings.
_LISTS = ("ignore", "targets")


class CompressedTensors(CodedMethod):
    """Integers of 2 to 8 bits, fp8 and 4-bit floats, mixed by layer."""

    name = _NAME
    Config: ClassVar[type] = CompressedTensorsConfig
    config: CompressedTensorsConfig
    EXAMPLE: ClassVar[Mapping[str, object]] = {
        "config_groups": {"all": {"targets": ["Linear"], "weights": {"strategy": "channel"}}}
    }

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        method = (checkpoint.quantization or {}).get("quant_method")
        return f"config.json says quant_method {_NAME}" if method == _NAME else None

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, object]:
        table = dict(checkpoint.quantization or {})
        layers = renamed_layers(checkpoint)
        groups = table.get("config_groups")
        if isinstance(groups, Mapping):
            table["config_groups"] = {
                name: _native(group, ("targets",), layers) for name, group in groups.items()
            }
        if "sparsity_config" in table:
            table["sparsity_config"] = _native(table["sparsity_config"], _LISTS, layers)
        return _native(table, _LISTS, layers)

    def skips(self, name: str) -> bool:
        return self.config.group(name) is None and not self.config.sparse(name)

    def skips_fused(self, name: str) -> bool:
        return matches(name, self.config.ignore or ())

    def rename(self, name: str) -> str | None:
        return None if _NEEDLESS.search(name) else name

    def scheme(self, spec: LinearSpec) -> StoredAs:
        group = self._group(spec)
        sparse = ", without the zeros of 2:4" if self._sparse(spec) else ""
        if group is None:
            return StoredAs(f"{spec.dtype}{sparse}", "other")
        weights, form = group.weights or Weights(), self.config.stored_as(group)
        size = (weights.group_size or 0) if weights.scope.endswith("group") else 0
        if weights.scope == "block":
            size = block_columns(spec, (weights.block_structure or (128, 128))[1])
        what = f"{size} inputs" if weights.scope.endswith("group") else weights.scope
        text = f"{weights.type}{weights.num_bits} ({form}), a scale per {what}{sparse}"
        kind = "int" if weights.type == "int" else "fp8" if weights.num_bits == 8 else "e2m1"
        return StoredAs(
            text, kind, weights.num_bits, size, not weights.symmetric, powers=form.startswith("mx")
        )

    def designed_activations(self, spec: LinearSpec) -> str:
        group = self._group(spec)
        if group is None or group.weights is None:
            return "bf16"
        if group.integers:
            return "int8"
        form = self.config.stored_as(group)
        if group.four_bit_floats and form == "nvfp4-pack-quantized":
            return "nvfp4"
        if form.startswith("mx"):
            return "mxfp4" if group.four_bit_floats else "mxfp8" if group.floats else "bf16"
        if not group.floats or group.weights.num_bits != 8:
            return "bf16"
        return "fp8" if group.weights.scope == "block" else "fp8_token"

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        group = self._group(spec)
        if group is None:
            return self._values(spec, spec.dtype)
        weights, form = group.weights or Weights(), self.config.stored_as(group)
        if self._sparse(spec) and "pack" in form:
            raise ConfigError(
                "quantization_config.sparsity_config",
                f"{spec.name}: {form} does not support 2:4 sparsity",
            )
        scale = ParamSpec(self._scale_axes(spec, weights), "float32", "weight_scale")
        if form == "marlin-24":
            row = INPUTS.packed(32)
            outputs = scale.axes[1] if weights.scope == "group" else fixed(1)
            return {
                "words": ParamSpec((row, OUTPUTS.packed(64, 32 * weights.num_bits)), "int32",
                                   "weight_packed"),
                "meta": ParamSpec((row, OUTPUTS.packed(64, 128)), "int16", "meta"),
                "scale": ParamSpec((outputs, OUTPUTS.packed(64, 64)), "float32", "scale_packed"),
            }  # fmt: skip
        if form == "pack-quantized":
            words, rows = (packed_axis(axis, weights.num_bits) for axis in (INPUTS, OUTPUTS))
            zeros = ParamSpec((rows, *scale.axes[1:]), "int32", "weight_zero_point")
            index = ParamSpec((PARTS, INPUTS), "int32", "weight_g_idx", optional=True)
            params = {
                "words": ParamSpec((OUTPUTS, words), "int32", "weight_packed"),
                "index": index,
            }
            return {**params, "scale": scale, **({} if weights.symmetric else {"zeros": zeros})}
        if form.endswith("fp4-pack-quantized"):
            pairs = ParamSpec((OUTPUTS, INPUTS.packed(2)), "uint8", "weight_packed")
            global_scale = ParamSpec((PARTS,), "float32", "weight_global_scale")
            more = {"global_scale": global_scale} if form.startswith("nv") else {}
            return {"pairs": pairs, "scale": scale, **more}
        dtype = "int8" if weights.type == "int" else "float8_e4m3fn"
        zeros = ParamSpec(scale.axes, "int8", "weight_zero_point")
        params = {**self._values(spec, dtype), "scale": scale}
        return params if weights.symmetric else {**params, "zeros": zeros}

    def _values(self, spec: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        """Return the parameters with one number per weight, stored with or without zeros."""
        if not self._sparse(spec):
            return {"weight": ParamSpec((OUTPUTS, INPUTS), dtype)}
        return {
            "compressed": ParamSpec((OUTPUTS, INPUTS.packed(2)), dtype),
            "bitmask": ParamSpec((OUTPUTS, INPUTS.packed(8)), "uint8"),
        }

    def example(self, spec: LinearSpec, name: str) -> Tensor | None:
        group = self._group(spec)
        if name == "bitmask":  # two of four
            return torch.tensor(0x55)
        if name != "index" or group is None or group.weights is None:
            return None
        return torch.arange(spec.inputs) // (group.weights.group_size or spec.inputs)

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        group = self._group(spec)
        if group is None:
            values = _numbers(stored, spec)
            ones = torch.ones(spec.outputs, 1, device=values.device)
            return (Codes(values, ones),)
        weights, scale = group.weights or Weights(), stored["scale"]
        if "meta" in stored:
            half, size = 2 ** (weights.num_bits - 1), weights.group_size or 0
            scale = plain_scales(scale, spec.inputs, size if weights.scope == "group" else 0)
            values = dense_codes(stored["words"], stored["meta"], weights.num_bits)
            return (Codes(values.to(torch.uint8), scale, torch.full_like(scale, half)),)
        if self.config.stored_as(group).startswith("mx"):
            scale = torch.exp2(scale - 127)
        if "global_scale" in stored:
            scale = scale / per_row(stored["global_scale"], spec)
        scale = self._grid(scale, spec, weights)
        if "words" in stored:
            return self._packed(stored, scale, spec, weights.num_bits)
        if "pairs" in stored:
            return (Codes(nibbles(stored["pairs"]), scale, levels=E2M1),)
        zeros = stored.get("zeros")
        grid = None if zeros is None else self._grid(zeros.float(), spec, weights)
        return (Codes(_numbers(stored, spec), scale, grid),)

    def _packed(
        self, stored: Mapping[str, Tensor], scale: Tensor, spec: LinearSpec, bits: int
    ) -> tuple[Codes, ...]:
        values = unpack_words(stored["words"], bits, 1)
        zeros = torch.full_like(scale, 2 ** (bits - 1))
        if "zeros" in stored:
            zeros = unpack_words(stored["zeros"], bits, 0).to(scale.dtype)
        return sorted_by_group(Codes(values, scale, zeros), stored.get("index"), spec)

    def _scale_axes(self, spec: LinearSpec, weights: Weights) -> tuple[Axis, ...]:
        """Return the axes of scales. Raises ConfigError if the inputs are not a multiple of the
        group size.
        """
        scope, total = weights.scope, spec.input_shard.total
        if scope == "tensor":
            return (PARTS,)
        if scope == "channel":
            return (OUTPUTS, fixed(1))
        if scope == "block":
            rows, columns = weights.block_structure or (128, 128)
            return (OUTPUTS.blocks(rows), INPUTS.blocks(columns))
        size = weights.group_size or 0
        if size < 1 or total % size or spec.inputs % size:
            raise ConfigError(
                "quantization_config.config_groups",
                f"{spec.name} has {spec.inputs} inputs, not a multiple of the group size {size}",
            )
        return (OUTPUTS, INPUTS.blocks(size))

    def _grid(self, stored: Tensor, spec: LinearSpec, weights: Weights) -> Tensor:
        """Return scales or zero points as [N, groups]."""
        if weights.scope == "tensor":
            return per_row(stored, spec)
        if weights.scope != "block":
            return stored
        return block_grid(stored, spec, *(weights.block_structure or (128, 128)))

    def _group(self, spec: LinearSpec) -> Group | None:
        """Return the scheme of a layer. Raises ConfigError if fused parts differ."""
        names = spec.part_names or (spec.name,)
        groups = [self.config.group(name) for name in names]
        if any(other != groups[0] for other in groups):
            listed = ", ".join(names)
            raise ConfigError(
                "quantization_config.config_groups",
                f"{listed}: fused layers have different settings",
            )
        return groups[0]

    def _sparse(self, spec: LinearSpec) -> bool:
        """Whether a layer is stored without zeros. Raises ConfigError if fused parts differ."""
        names = spec.part_names or (spec.name,)
        sparse = [self.config.sparse(name) for name in names]
        if any(sparse) != all(sparse):
            listed = ", ".join(names)
            raise ConfigError(
                "quantization_config.sparsity_config",
                f"{listed}: fused layers have different settings",
            )
        return sparse[0]


def _native(table: Any, keys: Sequence[str], layers: Mapping[str, str]) -> Any:
    """Add the model's names to lists of names in files. layers: see `renamed_layers`."""
    if not isinstance(table, Mapping) or not layers:
        return table
    lists = {key: table[key] for key in keys if isinstance(table.get(key), list)}
    more = {key: native_patterns(names, matches, layers) for key, names in lists.items()}
    return {**table, **{key: [*lists[key], *names] for key, names in more.items()}}


def _numbers(stored: Mapping[str, Tensor], spec: LinearSpec) -> Tensor:
    """Return one number per weight: [N, K]."""
    if "bitmask" in stored:
        return dense(stored["compressed"], stored["bitmask"], spec)
    return stored["weight"]
