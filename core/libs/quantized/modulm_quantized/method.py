"""Base class of quantization methods whose layers are codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import CheckpointInfo, LinearKind, LinearSpec, QuantizationMethod
from modulm_quantized.codes import CodedExperts, Codes
from modulm_quantized.experts import pack_stack
from modulm_quantized.fitting import Fitted, for_kernels
from modulm_quantized.stored import StoredAs

__all__ = ["ACTIVATIONS", "CodedMethod"]

#: Activation formats in products with codes: "bf16" is exact, "int8" has one scale per token and
#: 256 inputs.
ACTIVATIONS = ("bf16", "int8")


@frozen(eq=False)
class _LayerPart:
    """Some outputs of a layer: packed by a kernel, or codes.

    order: the column order of packed codes, if it differs from the inputs.
    """

    weight: Any
    order: Tensor | None


class CodedMethod(QuantizationMethod):
    """Reads layers as codes.

    Codes without a kernel format are dequantized to the model's dtype (stacks of experts to bf16).
    In fp32 models, or without kernels, the codes are kept and each product dequantizes them:
    slower, but with less memory.
    """

    api = 2
    #: Kinds of layers that files of this format may quantize.
    HELD: ClassVar[tuple[str, ...]] = ("linear", "lm_head", "expert")

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        method = (checkpoint.quantization or {}).get("quant_method")
        return f"config.json says quant_method {method}" if method == cls.name else None

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        if spec.kind not in cls.HELD:
            return f"{cls.name} does not support {spec.kind}"
        return (
            None
            if spec.dtype in platform.dtypes
            else f"{platform.name} does not support {spec.dtype}"
        )

    @abstractmethod
    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        """Convert a layer (or one expert) from the tensors that `create` declared, by name.

        Returns several codes, for consecutive outputs, if fused parts differ in column order.
        """

    def activations(self, spec: LinearSpec) -> str:
        """Activation format for a layer: one of ACTIVATIONS or `fp8_activations`."""
        return "bf16"

    def fp8_activations(self, spec: LinearSpec) -> str:
        """Return the activation format for formats designed for fp8 activations.

        "fp8" (one scale per token and 128 inputs) if the platform's kernels multiply fp8, otherwise
        "bf16". The head always gets "bf16" because its errors are errors of logits.
        """
        fits = spec.kind is not LinearKind.LM_HEAD and self.ops.supports("round_rows_fp8")
        return "fp8" if fits else "bf16"

    def scheme(self, spec: LinearSpec) -> StoredAs | None:
        """How the checkpoint stores a layer, for `modulm explain`. Raises ConfigError."""
        return None

    def note(self, spec: LinearSpec) -> str | None:
        stored_as = self.scheme(spec)
        if stored_as is None:
            return None
        return self.note_text(spec, stored_as.text, fits=stored_as.fits(spec))

    def note_text(self, spec: LinearSpec, text: str, *, fits: bool) -> str:
        """Return the note on a layer; `fits` says whether kernels multiply its codes."""
        if self._packer(spec) is None or fits:
            return text
        dtype = "bfloat16" if spec.experts else spec.dtype
        return f"{text}; dequantized to {dtype}: no kernel multiplies these codes"

    def _packer(self, spec: LinearSpec) -> Any:
        """Return the op that packs codes, or None if codes stay as they are."""
        name = "pack_quantized_experts" if spec.experts else "pack_quantized"
        return None if spec.dtype == "float32" else self.ops.find(name)

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        stored = {
            name: parameter.detach()
            for name in self.create(spec)
            if (parameter := layer._parameters[name]) is not None
        }
        for name in self.create(spec):
            layer.register_parameter(name, None)
        keeper: Any = layer
        if spec.experts:
            keeper.quantized = self._stack(stored, spec)
        else:
            keeper.quantized = tuple(self._hold(codes, spec) for codes in self.codes(stored, spec))

    def _hold(self, codes: Codes, spec: LinearSpec) -> _LayerPart:
        pack = self._packer(spec)
        if pack is None:
            return _LayerPart(codes, None)
        fit = for_kernels(codes)
        if fit is None:
            return _LayerPart(self.ops.pack_linear(codes.weight(getattr(torch, spec.dtype))), None)
        use = self.activations(spec)
        packed = pack(fit.values, fit.form, fit.group, fit.scales, fit.zeros, use)
        return _LayerPart(packed, codes.order)

    def _stack(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> Any:
        """Build the stack for `fused_experts`: packed, or codes per expert."""

        def codes_of(expert: int) -> Codes:
            one = {name: tensor[expert] for name, tensor in stored.items()}
            return _joined(self.codes(one, spec))

        pack, parts = self._packer(spec), len(spec.parts)
        if pack is None:
            whole = tuple(codes_of(expert) for expert in range(spec.experts))
            return CodedExperts(list(whole), getattr(torch, spec.dtype))

        def fitted(expert: int, wide: bool) -> Fitted | None:
            codes = codes_of(expert)
            return None if codes.order is not None else for_kernels(codes, wide=wide)

        packed = pack_stack(pack, fitted, spec.experts, parts, self.activations(spec))
        if packed is not None:
            return packed
        shape = (spec.experts, spec.outputs, spec.inputs)
        stack = torch.empty(shape, dtype=torch.bfloat16, device=self.platform.device)
        for expert in range(spec.experts):
            stack[expert] = codes_of(expert).weight(torch.bfloat16)
        return self.ops.pack_experts(stack, parts)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        parts: Any = layer.quantized
        if len(parts) == 1:
            return self._product(parts[0], x, bias)
        joined = torch.cat([self._product(one, x, None) for one in parts], -1)
        return joined if bias is None else joined + bias

    def _product(self, part: _LayerPart, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(part.weight, Codes):
            return F.linear(x, part.weight.weight(x.dtype), bias)
        seen = x if part.order is None else self.ops.take_columns(x, part.order)
        out: Tensor = self.ops.linear(seen, part.weight, bias)
        return out

    def experts(self, layer: torch.nn.Module) -> object:
        return layer.quantized

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        parts: Any = layer.quantized
        if spec.experts:
            return torch.stack([parts[expert] for expert in range(spec.experts)]).to(dtype)
        return torch.cat([self._weight(one) for one in parts]).to(dtype)

    def _weight(self, part: _LayerPart) -> Tensor:
        if isinstance(part.weight, Codes):
            return part.weight.weight(torch.float32)
        weight: Tensor = self.ops.unpack_linear(part.weight)
        if part.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, part.order, weight)


def _joined(parts: tuple[Codes, ...]) -> Codes:
    """Concatenate codes of consecutive outputs, in input order if theirs differ."""
    if len(parts) == 1:
        return parts[0]
    plain = [evolve(codes, order=None) for codes in map(_in_order, parts)]
    zeros = [codes.zeros for codes in plain if codes.zeros is not None]
    return Codes(
        torch.cat([codes.values for codes in plain]),
        torch.cat([codes.scales for codes in plain]),
        torch.cat(zeros) if zeros else None,
        levels=parts[0].levels,
    )


def _in_order(codes: Codes) -> Codes:
    """Return the same weight with one scale per input, so that the columns can be reordered."""
    if codes.order is None:
        return codes
    spread, back = codes.in_groups_of(1), codes.order.argsort()
    zeros = None if spread.zeros is None else spread.zeros[:, back]
    return Codes(spread.values[:, back], spread.scales[:, back], zeros, levels=codes.levels)
