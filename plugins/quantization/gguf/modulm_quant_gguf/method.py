"""Quantization method for GGUF files: ggml's blocks, stored as codes of the platform's kernels.

A block holds integers with a scale, and for some types a minimum, for 16 to 256 columns. Q4_K, Q5_K
and Q6_K are multiplied in their stored form. Other types of up to four bits, including those with a
table of sixteen values, become 4-bit codes; the rest become 8-bit codes. Scales are stored in 16
bits if the error is at most 2^-12 of the largest in a row. Without kernels, blocks stay as they
are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import field, frozen, validators
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import (
    INPUTS,
    OUTPUTS,
    CheckpointInfo,
    LinearKind,
    LinearSpec,
    ParamSpec,
    QuantizationMethod,
)
from modulm.errors import CheckpointError, UnsupportedError
from modulm_quant_gguf.entries import STORED
from modulm_quant_gguf.types import NAMED, Kind, decode, dequantize
from modulm_quantized import ACTIVATIONS, Codes, Fitted, exponents, pack_stack

__all__ = ["GGUF", "Blocks", "GGUFConfig", "Stack"]

#: Columns of a block for which ggml rounds activations with one scale.
_BLOCK = 256
#: Precision of activations, for notes.
_BITS = {"int8": "int8", "bf16": "16 bits"}
#: Types that kernels may multiply in their stored form.
_AS_THEY_ARE = ("Q4_K", "Q5_K", "Q6_K")
_EXPERT = re.compile(r"\bexperts\.\d+\.")


@frozen
class GGUFConfig:
    """Settings that the loader reads from the file.

    `types`: ggml's type of each layer. `activations`: what kernels round activations to, "int8" (as
    llama.cpp does) or "bf16" (16 bits, as exact as bf16). Models in float32 are not rounded.
    """

    quant_method: str = "gguf"
    types: dict[str, str] = field(factory=dict)
    activations: str = field(default="int8", validator=validators.in_(ACTIVATIONS))


@frozen(eq=False)
class Blocks:
    """Rows of a weight as stored: [N, bytes of a row], or plain numbers [N, K]."""

    kind: Kind
    stored: Tensor

    def weight(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.kind, self.stored).to(dtype)

    def codes(self, dtype: torch.dtype) -> Codes:
        """Return the rows as codes; see `Decoded.codes`."""
        return decode(self.kind, self.stored).codes(dtype)


@frozen(eq=False)
class Stack:
    """Experts as stored; `stack[e]` is the weight [N, K] of one in `dtype`."""

    kind: Kind
    stored: Tensor
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Tensor:
        return dequantize(self.kind, self.stored[expert]).to(self.dtype)


@frozen(eq=False)
class _PackedPart:
    """Some outputs of a layer: packed by a kernel, or `Blocks`."""

    weight: Any
    outputs: int


class GGUF(QuantizationMethod):
    """Handles all layers of GGUF files; each part of a fused layer may have its own type."""

    name = "gguf"
    api = 2
    Config: ClassVar[type] = GGUFConfig
    config: GGUFConfig

    def __init__(self, config: object, platform: Any, ops: Any) -> None:
        super().__init__(config, platform, ops)
        self._tables: dict[tuple[int, int], Kind] = {}

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        method = (checkpoint.quantization or {}).get("quant_method")
        return "the checkpoint is a GGUF file" if method == cls.name else None

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        return (
            None
            if spec.dtype in platform.dtypes
            else f"{platform.name} does not support {spec.dtype}"
        )

    def _activations(self, spec: LinearSpec, kind: Kind) -> str:
        # Errors in the head become errors in logits. For blocks of 256, ggml rounds activations as
        # the kernels do; for other types, it uses a finer scale than the kernels.
        coarse = spec.kind is LinearKind.LM_HEAD and kind.block < _BLOCK
        return "bf16" if coarse else self.config.activations

    def _blocks(self, kind: Kind, spec: LinearSpec) -> Any:
        """Return the op that packs such blocks in their stored form, or None."""
        name = "pack_block_experts" if spec.experts else "pack_blocks"
        if kind.name not in _AS_THEY_ARE or spec.dtype == "float32":
            return None
        return self.ops.find(name)

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        kinds = self._kinds(spec)
        if spec.kind is LinearKind.EMBEDDING:
            self._tables[spec.outputs, spec.inputs] = kinds[0]
        if len(set(kinds)) == 1:
            return {STORED: _stored(kinds[0], spec)}
        return {f"{STORED}_{i}": _stored(kind, spec, i) for i, kind in enumerate(kinds)}

    def note(self, spec: LinearSpec) -> str | None:
        kinds = self._kinds(spec)
        types = " + ".join(kind.name for kind, _ in groupby(kinds))
        coded = [kind for kind in kinds if kind.decode is not None]
        pack = "pack_quantized_experts" if spec.experts else "pack_quantized"
        unrounded = (
            spec.kind is LinearKind.EMBEDDING
            or spec.dtype == "float32"
            or not self.ops.supports(pack)
        )
        if unrounded or not coded:
            return types
        uses = dict.fromkeys(_BITS[self._activations(spec, kind)] for kind in coded)
        return f"{types}, activations in {' and '.join(uses)}"

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        module: Any = layer
        if spec.kind is LinearKind.EMBEDDING:
            module.values = getattr(torch, spec.dtype)
            module.table = Blocks(self._kinds(spec)[0], layer.get_parameter(STORED).detach())
            # A table that is tied to the head is stored by the head.
            if "lm_head" in self.config.types and module.table.kind.decode is not None:
                module.table = self._pack(module.table, spec).weight
                layer.register_parameter(STORED, None)
            return
        stored = {name: layer.get_parameter(name).detach() for name in self.create(spec)}
        for name in stored:
            layer.register_parameter(name, None)
        if spec.experts:
            module.quantized = self._stack(stored, spec)
            return
        module.quantized = tuple(self._pack(part, spec) for part in self._parts(stored, spec))
        bias, sizes = layer._parameters.get("bias"), [one.outputs for one in module.quantized]
        module.biases = None if bias is None else torch.split(bias.detach(), sizes)

    def _pack(self, blocks: Blocks, spec: LinearSpec) -> _PackedPart:
        """Pack blocks with a kernel, or keep them as stored."""
        count = len(blocks.stored)
        if blocks.kind.decode is None:
            return _PackedPart(self.ops.pack_linear(blocks.stored), count)
        pack = self.ops.find("pack_quantized")
        if pack is None or spec.dtype == "float32":
            return _PackedPart(blocks, count)
        use, as_it_is = self._activations(spec, blocks.kind), self._blocks(blocks.kind, spec)
        if as_it_is is not None:
            return _PackedPart(as_it_is(blocks.stored, blocks.kind.name.lower(), use), count)
        fit = _fit(blocks, spec)
        return _PackedPart(pack(fit.values, fit.form, fit.group, fit.scales, fit.zeros, use), count)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        module: Any = layer
        parts = module.quantized
        if len(parts) == 1:
            return self._product(parts[0], x, bias)
        out, first = x.new_empty(*x.shape[:-1], sum(one.outputs for one in parts)), 0
        for part, one in enumerate(parts):
            share = None if bias is None else module.biases[part]
            self._product(one, x, share, out[..., first : first + one.outputs])
            first += one.outputs
        return out

    def _product(
        self, part: _PackedPart, x: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(part.weight, Blocks | Tensor):
            plain = part.weight
            weight = plain.weight(x.dtype) if isinstance(plain, Blocks) else plain
            result = F.linear(x, weight, bias)
            return result if out is None else out.copy_(result)
        out_argument = () if out is None else (out,)
        product: Tensor = self.ops.linear(x, part.weight, bias, *out_argument)
        return product

    def experts(self, layer: torch.nn.Module) -> object:
        keeper: Any = layer
        return keeper.quantized

    def _stack(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> Any:
        """Return experts as `fused_experts` takes them. Raises UnsupportedError for mixed types."""
        kinds = self._kinds(spec)
        if len(set(kinds)) > 1:
            names = " and ".join(kind.name for kind in kinds)
            raise UnsupportedError(
                f"{spec.name}: experts with mixed types ({names}) are not supported yet"
            )
        (whole,) = stored.values()
        if kinds[0].decode is None:
            return self.ops.pack_experts(whole, len(spec.parts))
        pack = self.ops.find("pack_quantized_experts")
        if pack is None or spec.dtype == "float32":
            return Stack(kinds[0], whole, getattr(torch, spec.dtype))
        use, as_they_are = self._activations(spec, kinds[0]), self._blocks(kinds[0], spec)
        if as_they_are is not None:
            return as_they_are(whole, kinds[0].name.lower(), len(spec.parts), use)

        def fitted(expert: int, wide: bool) -> Fitted:
            return _fit(Blocks(kinds[0], whole[expert]), spec, wide=wide)

        return pack_stack(pack, fitted, spec.experts, len(spec.parts), use)

    def share(self, head: torch.nn.Module, table: torch.nn.Module) -> None:
        module: Any = head
        (part,) = module.quantized
        if self.ops.supports("embedding_packed") and not isinstance(part.weight, Blocks | Tensor):
            table.table = part.weight
            table.register_parameter(STORED, None)

    def embed(self, layer: torch.nn.Module, ids: Tensor) -> Tensor:
        keeper: Any = layer
        dtype, table = keeper.values, keeper.table
        rows: Tensor
        if not isinstance(table, Blocks):
            rows = self.ops.embedding_packed(ids, table, dtype)
        elif table.kind.decode is None:
            rows = self.ops.embedding(ids, table.stored)
        else:
            rows = dequantize(table.kind, table.stored[ids]).to(dtype)
        return rows

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> Tensor:
        keeper: Any = layer
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if spec.experts:
            return torch.stack([keeper.quantized[expert] for expert in range(spec.experts)]).to(
                dtype
            )
        if spec.kind is LinearKind.EMBEDDING:
            return self.embed(keeper, torch.arange(spec.outputs, device=self.platform.device))
        return torch.cat([self._weight(one.weight) for one in keeper.quantized]).to(dtype)

    def _weight(self, weights: Any) -> Tensor:
        if isinstance(weights, Blocks):
            return weights.weight(torch.float32)
        weight: Tensor = self.ops.unpack_linear(weights)
        return weight

    def _parts(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> Iterator[Blocks]:
        """Yield adjacent outputs of one type each."""
        kinds = self._kinds(spec)
        if STORED in stored:
            yield Blocks(kinds[0], stored[STORED])
            return
        numbered = ((kind, stored[f"{STORED}_{i}"]) for i, kind in enumerate(kinds))
        for kind, parts in groupby(numbered, key=lambda part: part[0]):
            yield Blocks(kind, torch.cat([rows for _, rows in parts]))

    # Types of layers.

    def _kinds(self, spec: LinearSpec) -> tuple[Kind, ...]:
        """Return the type of each part; plain numbers for a layer that the file lacks."""
        whole = self.config.types.get(spec.name)
        if whole is not None:
            return (self._kind(whole, spec),) * len(spec.parts)
        names = spec.part_names or (spec.name,)
        return tuple(self._of(name, spec) for name in names)

    def _of(self, name: str, spec: LinearSpec) -> Kind:
        name_of_type = self.config.types.get(_EXPERT.sub("experts.", name))
        if name_of_type is None and spec.kind is LinearKind.LM_HEAD:
            return self._tables.get((spec.outputs, spec.inputs), NAMED["F32"])
        return self._kind(name_of_type or "F32", spec)

    def _kind(self, name_of_type: str, spec: LinearSpec) -> Kind:
        if name_of_type not in NAMED:
            raise CheckpointError(
                f"quantization_config.types: {spec.name}: {name_of_type!r} is not a GGUF type"
            )
        return NAMED[name_of_type]


def _fit(blocks: Blocks, spec: LinearSpec, *, wide: bool = False) -> Fitted:
    """Convert blocks to the kernels' format. wide: fp32 scales, which experts always support."""
    decoded = decode(blocks.kind, blocks.stored)
    codes = decoded.codes(getattr(torch, spec.dtype))
    group = 0 if codes.scales.shape[1] == 1 else codes.group
    scales, zeros = codes.scales, codes.zeros
    form = decoded.table or ("int4" if codes.values.dtype == torch.uint8 else "int8")
    if form == "int4" and zeros is None:
        zeros = torch.zeros_like(scales)
    if wide:
        scales = scales.float()
    elif decoded.table == "e2m1":
        scales = exponents(scales)
    return Fitted(form, group, codes.values, scales, zeros)


def _stored(kind: Kind, spec: LinearSpec, part: int | None = None) -> ParamSpec:
    """Return the parameter for rows of blocks, or of numbers in the layer's dtype."""
    if kind.decode is None:
        return ParamSpec((OUTPUTS, INPUTS), spec.dtype, stored=STORED, part=part)
    axes = (OUTPUTS, INPUTS.packed(kind.block, kind.bytes))
    return ParamSpec(axes, "uint8", stored=STORED, part=part)
