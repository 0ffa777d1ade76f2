"""A quantization method whose layers are codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import CheckpointInfo, LinearSpec, QuantizationMethod
from modulm_quantized.codes import CodedExperts, Codes
from modulm_quantized.experts import pack_stack
from modulm_quantized.fitting import Fitted, for_kernels
from modulm_quantized.stored import StoredAs

__all__ = ["ACTIVATIONS", "CodedMethod"]

#: What kernels make of activations before a product with codes: "bf16" loses nothing, "int8" is a
#: scale per token and 256 inputs.
ACTIVATIONS = ("bf16", "int8")


@frozen(eq=False)
class _Held:
    """Some outputs of a layer: packed by a kernel, or codes; and the order of its columns, if the
    packed ones are not in that of the inputs."""

    weight: Any
    order: Tensor | None


class CodedMethod(QuantizationMethod):
    """Reads layers as codes.

    Codes that the platform's kernels do not know become the weight that they stand for, in the
    model's dtype (stacks of experts in bf16). Where the model computes in fp32, or there are no
    kernels, codes are kept, and the weight is made anew for each product: slower, in less memory.
    """

    api = 2
    #: Kinds of layers that files of the format may hold so.
    HELD: ClassVar[tuple[str, ...]] = ("linear", "lm_head", "expert")

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        method = (checkpoint.quantization or {}).get("quant_method")
        return f"config.json says quant_method {method}" if method == cls.name else None

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        if spec.kind not in cls.HELD:
            return f"{cls.name} does not hold the {spec.kind}"
        return None if spec.dtype in platform.dtypes else f"{platform.name} has no {spec.dtype}"

    @abstractmethod
    def codes(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        """The layer (or one expert) from what `create` asked for, by name.

        Usually one; several, for neighbouring outputs, where parts differ in the order of columns.
        """

    def activations(self, spec: LinearSpec) -> str:
        """What kernels round the activations of a layer to, one of ACTIVATIONS or
        `fp8_activations`.
        """
        return "bf16"

    def fp8_activations(self, spec: LinearSpec) -> str:
        """For formats made for activations in fp8: "fp8", a scale per token and 128 inputs, where
        the platform's kernels have products of fp8, else "bf16"; also for the head, whose errors
        are those of logits.
        """
        fits = spec.kind != "lm_head" and hasattr(self.ops, "round_rows_fp8")
        return "fp8" if fits else "bf16"

    def scheme(self, spec: LinearSpec) -> StoredAs | None:
        """How the checkpoint stores a layer, for `modulm explain`. Raises ConfigError."""
        return None

    def note(self, spec: LinearSpec) -> str | None:
        found = self.scheme(spec)
        if found is None:
            return None
        return self.told(spec, found.text, fits=found.fits(spec))

    def told(self, spec: LinearSpec, text: str, *, fits: bool) -> str:
        """The text of a note on a layer whose codes kernels have, or have not."""
        if self._packer(spec) is None or fits:
            return text
        dtype = "bfloat16" if spec.experts else spec.dtype
        return f"{text}; held as {dtype}: no kernel multiplies such codes"

    def _packer(self, spec: LinearSpec) -> Any:
        """The op that packs codes, or None where codes are kept as they are."""
        name = "pack_quantized_experts" if spec.experts else "pack_quantized"
        return None if spec.dtype == "float32" else getattr(self.ops, name, None)

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
            keeper.held = self._stack(stored, spec)
        else:
            keeper.held = tuple(self._hold(codes, spec) for codes in self.codes(stored, spec))

    def _hold(self, codes: Codes, spec: LinearSpec) -> _Held:
        pack = self._packer(spec)
        if pack is None:
            return _Held(codes, None)
        fit = for_kernels(codes)
        if fit is None:
            return _Held(self.ops.pack_linear(codes.weight(getattr(torch, spec.dtype))), None)
        use = self.activations(spec)
        packed = pack(fit.values, fit.form, fit.group, fit.scales, fit.zeros, use)
        return _Held(packed, codes.order)

    def _stack(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> Any:
        """What `fused_experts` takes: packed, or codes expert by expert."""

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
        held: Any = layer.held
        if len(held) == 1:
            return self._product(held[0], x, bias)
        whole = torch.cat([self._product(one, x, None) for one in held], -1)
        return whole if bias is None else whole + bias

    def _product(self, held: _Held, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(held.weight, Codes):
            return F.linear(x, held.weight.weight(x.dtype), bias)
        seen = x if held.order is None else self.ops.take_columns(x, held.order)
        out: Tensor = self.ops.linear(seen, held.weight, bias)
        return out

    def experts(self, layer: torch.nn.Module) -> object:
        return layer.held

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        held: Any = layer.held
        if spec.experts:
            return torch.stack([held[expert] for expert in range(spec.experts)]).to(dtype)
        return torch.cat([self._weight(one) for one in held]).to(dtype)

    def _weight(self, held: _Held) -> Tensor:
        if isinstance(held.weight, Codes):
            return held.weight.weight(torch.float32)
        weight: Tensor = self.ops.unpack_linear(held.weight)
        if held.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, held.order, weight)


def _joined(parts: tuple[Codes, ...]) -> Codes:
    """Codes of neighbouring outputs as one, in the inputs' own order if theirs differ."""
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
    """The same weight with a scale for every input, so that inputs can have their own order."""
    if codes.order is None:
        return codes
    spread, back = codes.in_groups_of(1), codes.order.argsort()
    zeros = None if spread.zeros is None else spread.zeros[:, back]
    return Codes(spread.values[:, back], spread.scales[:, back], zeros, levels=codes.levels)
