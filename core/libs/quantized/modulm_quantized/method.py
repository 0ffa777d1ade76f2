"""Base class of quantization methods whose layers are codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import CheckpointInfo, LinearKind, LinearSpec, QuantizationMethod
from modulm_quantized.activations import ACTIVATION_FORMATS
from modulm_quantized.codes import CodedExperts, Codes
from modulm_quantized.experts import pack_stack
from modulm_quantized.fitting import Fitted, for_kernels
from modulm_quantized.flags import LowPrecisionFlags
from modulm_quantized.norms import FUSED, fuses
from modulm_quantized.published import Covers, native_lists
from modulm_quantized.stored import StoredAs

__all__ = ["ACTIVATIONS", "CodedMethod"]

#: Formats that settings may name: "bf16" is exact, "int8" has one scale per token and 256 inputs.
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
    #: Settings that list layers by their names in files, and how these are compared with patterns.
    LISTS: ClassVar[Mapping[str, Covers]] = {}

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, object]:
        return native_lists(checkpoint, checkpoint.quantization or {}, cls.LISTS)

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

    def designed_activations(self, spec: LinearSpec) -> str:
        """Return the format that the checkpoint's weights were made to be multiplied with.

        A name of ACTIVATION_FORMATS, or "bf16" if only weights are quantized.
        """
        return "bf16"

    def activations(self, spec: LinearSpec) -> str:
        """Return the format that a layer's inputs are quantized to: the designed one, or "bf16".

        `linear` and `fused_experts` quantize on the fly, with scales of their own unless the format
        is static, or the norm before them has done so (norms.py). Methods whose settings name a
        format return that.
        """
        name = self.designed_activations(spec)
        return name if self.in_16_bits(spec, name) is None else "bf16"

    def in_16_bits(self, spec: LinearSpec, name: str) -> str | None:
        """Return why a layer multiplies in 16 bits instead of the format `name`, or None."""
        flags = self.low_precision_flags
        if name == "bf16":
            return "only weights are quantized"
        if spec.kind is LinearKind.LM_HEAD and name != "int8":
            return "errors of the head are errors of logits"
        if flags.activation_quantization == "off":
            return "--activation-quantization off"
        if self._packer(spec) is None:
            return "no kernel multiplies codes here"
        ability = self.ops.find("low_precision")
        fast = None if ability is None else ability(name)
        if fast is None:
            return f"no kernel multiplies {name} here"
        if not fast and flags.activation_quantization == "auto":
            because = self._measured(name)
            return f"{name} is not faster here{because}; --activation-quantization on uses it"
        return None

    @property
    def low_precision_flags(self) -> LowPrecisionFlags:
        """The flags of products in low precision, or their defaults."""
        return LowPrecisionFlags() if self.flags is None else self.flags.group(LowPrecisionFlags)

    def _measured(self, name: str) -> str:
        """Return what the kernels have measured about inputs in a format, or ""."""
        note = self.ops.find("low_precision_note")
        return "" if note is None else f" ({note(name)})"

    def input_scale(self, stored: Mapping[str, Tensor], spec: LinearSpec) -> Tensor | None:
        """Return the static scale of a layer's inputs, one fp32 number, or None."""
        return None

    def scheme(self, spec: LinearSpec) -> StoredAs | None:
        """How the checkpoint stores a layer, for `modulm explain`. Raises ConfigError."""
        return None

    def note(self, spec: LinearSpec) -> str | None:
        stored_as = self.scheme(spec)
        if stored_as is None:
            return None
        text = self.note_text(spec, stored_as.text, fits=stored_as.fits(spec))
        name = self.designed_activations(spec)
        if name == "bf16" or not stored_as.fits(spec):
            return text
        reason = self.in_16_bits(spec, name)
        if reason is None:
            before = name in FUSED and spec._input_shard is None and fuses(self.ops)
            by = ", by the norm before if there is one" if before else ""
            measured = self._measured(name)
            return f"{text}; inputs quantized to {ACTIVATION_FORMATS[name]}{by}{measured}"
        return f"{text}; products in 16 bits: {reason}"

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
            scale = self.input_scale(stored, spec)
            parts = self.codes(stored, spec)
            keeper.quantized = tuple(self._hold(codes, spec, scale) for codes in parts)

    def _hold(self, codes: Codes, spec: LinearSpec, scale: Tensor | None = None) -> _LayerPart:
        pack = self._packer(spec)
        if pack is None:
            return _LayerPart(codes, None)
        fit = for_kernels(codes)
        if fit is None:
            return _LayerPart(self.ops.pack_linear(codes.weight(getattr(torch, spec.dtype))), None)
        use = self.activations(spec)
        if use == "fp8_static":  # of a checkpoint that may lack the scale of a layer
            use, more = ("fp8_token", {}) if scale is None else (use, {"input_scale": scale})
        else:
            more = {}
        packed = pack(fit.values, fit.form, fit.group, fit.scales, fit.zeros, use, **more)
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

        use = self.activations(spec).replace("_static", "_token")
        packed = pack_stack(pack, fitted, spec.experts, parts, use)
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
            # Packed, since torch's products round by the number of rows.
            weight = self.ops.pack_linear(part.weight.weight(x.dtype))
            return torch.as_tensor(self.ops.linear(x, weight, bias))
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
