"""MLX checkpoints, as mlx-lm writes them.

A weight is scale * code + bias, with a scale and a bias per group of inputs. Codes of 2 to 8 bits
are stored consecutively in 32-bit words, from the lowest bits up (`mx.quantize`, mode "affine", MLX
0.32). Layers with scales in the files are quantized, including embeddings, routers and heads.
config.json has the bits and group size of all layers, and of layers that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    CheckpointInfo,
    LinearKind,
    LinearSpec,
    ParamSpec,
)
from modulm.errors import ConfigError, UnsupportedError
from modulm.structure import Problem, structure_table
from modulm_quantized import CodedMethod, Codes, StoredAs, packed_axis, unpack_words
from modulm_tensor_files import read_header

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MLX", "Affine", "MLXConfig"]

_WEIGHT, _WORDS = ".weight", "uint32"
#: Names of the embedding table in models.
_TABLES = ("embed_tokens", "embeddings", "wte", "embed_in", "tok_embeddings")
#: MLX's names of an expert's projections -> Mixtral's, and the reverse.
_PARTS_HERE = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_PARTS_THERE = {here: there for there, here in _PARTS_HERE.items()}


@frozen
class Affine:
    """How one layer is stored."""

    OPEN_ENDED: ClassVar[bool] = True

    bits: int = field(default=4, validator=validators.in_((2, 3, 4, 5, 6, 8)))
    group_size: int = field(default=64, validator=validators.gt(0))
    mode: str = field(default="affine", validator=validators.in_(("affine",)))


@frozen
class MLXConfig(Affine):
    """`quantization_config` (or `quantization`) of config.json.

    overrides: settings of single layers, by name. plain: layers whose weights are not quantized.
    tied: whether the files have no weight for the LM head.
    """

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "mlx"
    overrides: dict[str, Any] = field(factory=dict)
    plain: tuple[str, ...] = ()
    tied: bool = True


class MLX(CodedMethod):
    """Codes with a scale and a bias per group of inputs."""

    name = "mlx"
    HELD: ClassVar[tuple[str, ...]] = (*CodedMethod.HELD, "embedding", "router")
    #: Name of a group's bias.
    BIASES: ClassVar[str] = "biases"
    Config: ClassVar[type] = MLXConfig
    config: MLXConfig

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        table = _table(checkpoint)
        if "quant_method" in table or not {"bits", "group_size"} <= set(table):
            return super().claims(checkpoint)
        return "config.json has bits and a group size but no quant_method, as MLX writes it"

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, object]:
        table = _table(checkpoint)
        overrides = {
            name: table_of_layer
            for name, table_of_layer in table.items()
            if isinstance(table_of_layer, Mapping)
        }
        settings = {**table, "overrides": overrides}
        if checkpoint.folder is not None:
            weights = _weights(checkpoint.folder)
            plain = [name for name, coded in weights.items() if not coded]
            settings["tied"] = tied = not any(name.endswith("lm_head") for name in weights)
            if tied and any(name.endswith(_TABLES) for name in plain):
                plain.append("lm_head")
            settings["plain"] = plain
        return settings

    def skips(self, name: str) -> bool:
        return _in_files(name) in self.config.plain

    def skips_fused(self, name: str) -> bool:
        return False

    def rename(self, name: str) -> str | None:
        # Experts are stacked. Mixtral's projections have the names that other models use.
        head, switch, tail = name.partition(".switch_mlp.")
        if not switch:
            return name
        part, _, parameter = tail.partition(".")
        if head.endswith("block_sparse_moe"):
            part = _PARTS_HERE.get(part, part)
        return f"{head}.experts.{part}.{parameter}"

    def scheme(self, spec: LinearSpec) -> StoredAs:
        forms = self._forms(spec)
        form = max(forms, key=lambda one: one.bits)
        stored = StoredAs.integers(form.bits, form.group_size, zeros=True)
        texts = dict.fromkeys(
            StoredAs.integers(f.bits, f.group_size, zeros=True).text for f in forms
        )
        return StoredAs(" + ".join(texts), stored.kind, form.bits, form.group_size, zeros=True)

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        forms = self._forms(spec)
        if len(set(forms)) == 1:
            return self._stored(forms[0], spec)
        if spec.experts:
            raise UnsupportedError(
                f"{spec.name}: experts with mixed bit widths are not supported yet"
            )
        return {
            f"{key}_{part}": param
            for part, form in enumerate(forms)
            for key, param in self._stored(form, spec, part).items()
        }

    def _stored(
        self, form: Affine, spec: LinearSpec, part: int | None = None
    ) -> dict[str, ParamSpec]:
        size, total = form.group_size, spec.input_shard.total
        if total % size or spec.inputs % size:
            raise ConfigError(
                "quantization_config.group_size",
                f"{spec.name} has {spec.inputs} inputs, not a multiple of the group size {size}",
            )
        groups = (OUTPUTS, INPUTS.blocks(size))
        word_axis = (OUTPUTS, packed_axis(INPUTS, form.bits))
        return {
            "codes": ParamSpec(word_axis, "int32", "weight", part, lambda t: t.view(torch.int32)),
            "scales": ParamSpec(groups, "float32", "scales", part),
            "shifts": ParamSpec(groups, "float32", self.BIASES, part),
        }

    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        forms = self._forms(spec)
        if "codes" in stored:
            return (_codes(stored["codes"], stored["scales"], stored["shifts"], forms[0]),)
        return tuple(
            _codes(*(stored[f"{key}_{part}"] for key in ("codes", "scales", "shifts")), form)
            for part, form in enumerate(forms)
        )

    def _forms(self, spec: LinearSpec) -> list[Affine]:
        """Return the form of each part of a layer."""
        return [self._form(name, spec.name) for name in spec.part_names or (spec.name,)]

    def _form(self, name: str, fused: str) -> Affine:
        overrides = self.config.overrides
        settings = {"bits": self.config.bits, "group_size": self.config.group_size}
        settings |= overrides.get(_in_files(name)) or overrides.get(fused) or {}
        try:
            return structure_table(settings, Affine, open_ended=True)
        except Problem as problem:
            raise ConfigError(f"quantization_config.{name}", str(problem)) from problem

    # Embedding tables.

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        if spec.kind is not LinearKind.EMBEDDING:
            super().finish(layer, spec)
            return
        keeper: Any = layer
        keeper.values, keeper.packed = getattr(torch, spec.dtype), None
        keeper.form = self._forms(spec)[0]
        if not self.config.tied:
            table = self._rows(keeper).weight(keeper.values)
            self._drop(layer)
            layer.register_parameter("weight", torch.nn.Parameter(table, requires_grad=False))

    def share(self, head: torch.nn.Module, table: torch.nn.Module) -> None:
        module: Any = head
        (part,) = module.quantized
        if self.ops.supports("embedding_packed") and not isinstance(part.weight, Codes):
            table.packed = part.weight
            self._drop(table)

    def embed(self, layer: torch.nn.Module, ids: Tensor) -> Tensor:
        keeper: Any = layer
        rows: Tensor
        if keeper.packed is not None:
            rows = self.ops.embedding_packed(ids, keeper.packed, keeper.values)
        elif "weight" in keeper._parameters:
            rows = super().embed(layer, ids)
        else:
            rows = self._rows(keeper, ids).weight(keeper.values)
        return rows

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> Tensor:
        if spec.kind is not LinearKind.EMBEDDING:
            return super().dequantize(layer, spec)
        return self.embed(layer, torch.arange(spec.outputs, device=self.platform.device))

    def _rows(self, table: Any, ids: Tensor | slice = slice(None)) -> Codes:
        stored = (table.get_parameter(key).detach()[ids] for key in ("codes", "scales", "shifts"))
        return _codes(*stored, table.form)

    def _drop(self, table: torch.nn.Module) -> None:
        for key in ("codes", "scales", "shifts"):
            table.register_parameter(key, None)


def _codes(packed: Tensor, scales: Tensor, shifts: Tensor, form: Affine) -> Codes:
    """Convert scale * code + bias to scale * (code - zero)."""
    return Codes(unpack_words(packed, form.bits, 1), scales, -shifts / scales)


def _table(checkpoint: CheckpointInfo) -> Mapping[str, Any]:
    """Return the quantization settings; older files have them only under MLX's own key."""
    if checkpoint.quantization:
        return checkpoint.quantization
    mlx_settings = checkpoint.config.get("quantization")
    return mlx_settings if isinstance(mlx_settings, Mapping) else {}


def _in_files(name: str) -> str:
    """Return a layer's name in the files. Experts, which are numbered here, are stacked there."""
    before, experts, one = name.partition(".experts.")
    if not experts:
        return name
    part = one.rpartition(".")[2]
    return f"{before}.switch_mlp.{_PARTS_THERE.get(part, part)}"


def _weights(folder: Path) -> dict[str, bool]:
    """Return the layers of a folder, and whether each is quantized. Raises CheckpointError for a
    file that cannot be read.
    """
    return {
        tensor.name.removesuffix(_WEIGHT): tensor.dtype == _WORDS
        for file in sorted(folder.glob("*.safetensors"))
        for tensor in read_header(file)
        if tensor.name.endswith(_WEIGHT)
    }
