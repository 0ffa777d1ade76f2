"""Norms that quantize their results for the layers that read them.

The contract: a layer whose method multiplies quantized inputs quantizes them itself, unless its
input carries them already: attribute `rounded` of the tensor, (format, static scale or None, the
kernels' numbers). The op `rms_norm_rounded` returns such a tensor. `fuse_norms` lets norms call it
whose results are read by such layers, in the format of the first of them; the tensor still has its
numbers in 16 bits, for whatever else reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

from modulm.contracts.quantization import LinearSpec
from modulm.nn.norm import RMSNorm
from modulm.ops import twins
from modulm_quantized.activations import ACTIVATION_FORMATS, round_activations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.ops import Ops

__all__ = ["FUSED", "fuse_norms", "fuses", "rms_norm_rounded"]

#: Formats that norms can quantize to.
FUSED = tuple(ACTIVATION_FORMATS)
_OP = "rms_norm_rounded"


def rms_norm_rounded(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    form: str,
    scale: Tensor | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Compute `rms_norm`, or `add_rms_norm` with a residual, of x [T, H], and quantize the result.

    form: one of FUSED. scale: one fp32 number for "fp8_static". The result's `rounded` is (form,
    scale, `Codes` or the kernels' numbers).
    """
    if residual is None:
        normed = twins.rms_norm(x, weight, eps, offset=offset)
    else:
        normed = twins.add_rms_norm(x, residual, weight, eps, offset=offset)
    codes = round_activations(normed, form, scale)
    normed.rounded = form, scale, codes  # type: ignore[attr-defined]
    return normed


def fuses(ops: Ops) -> bool:
    """Whether a kernel quantizes the results of norms here."""
    provider: str = getattr(ops, "providers", {}).get(_OP, "torch")
    return provider != "torch"


def fuse_norms(model: Module) -> int:
    """Let norms quantize what layers read next, where a kernel does; return how many do.

    Layers of decoders name the norms and their readers (`norm_readers`).
    """
    pairs = [
        (norm, layer)
        for module in model.modules()
        for norm, readers in getattr(module, "norm_readers", tuple)()
        if type(norm) is RMSNorm and norm.weight is not None and fuses(norm.ops)
        if not isinstance(norm.ops, _RoundingOps)
        if (layer := _first(readers, norm.weight.shape[-1])) is not None
    ]
    for norm, layer in pairs:
        norm.ops = _RoundingOps(norm.ops, layer)  # type: ignore[assignment]
    return len(pairs)


class _RoundingOps:
    """A norm's op table. layer: the layer in whose format results are quantized, if it still is
    one of FUSED when a step runs: an update may replace weights.
    """

    def __init__(self, ops: Ops, layer: Module) -> None:
        self._ops, self._layer = ops, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, offset: float = 0.0
    ) -> Tensor:
        form, scale = _rounding(self._layer)
        if out is not None or x.dim() != 2 or form not in FUSED:
            return self._ops.rms_norm(x, weight, eps, out, offset)
        return self._rounded(x, None, weight, eps, form, scale, offset)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None,
        offset: float = 0.0,
    ) -> Tensor:  # fmt: skip
        form, scale = _rounding(self._layer)
        if out is not None or x.dim() != 2 or form not in FUSED:
            return self._ops.add_rms_norm(x, residual, weight, eps, out, offset)
        return self._rounded(x, residual, weight, eps, form, scale, offset)

    def _rounded(self, *arguments: Any) -> Tensor:
        op: Any = self._ops.find(_OP)
        normed: Tensor = op(*arguments)
        return normed


def _first(readers: Sequence[Module], size: int) -> Module | None:
    """Return the first layer that reads the norm's result [T, size] and quantizes it."""
    return next((layer for layer in _layers(readers, size) if _rounding(layer)[0] in FUSED), None)


def _layers(readers: Sequence[Module], size: int) -> Iterator[Module]:
    """Yield the layers in `readers` with inputs of this size that are not split: a layer of split
    inputs ends a branch.
    """
    for reader in readers:
        for module in reader.modules():
            spec: Any = getattr(module, "spec", None)
            if isinstance(spec, LinearSpec) and spec.inputs == size and spec._input_shard is None:
                yield module


def _rounding(layer: Any) -> tuple[str, Tensor | None]:
    """Return the format that a layer quantizes inputs to, and its static scale; "" if to none."""
    quantized = getattr(layer, "quantized", None)
    if isinstance(quantized, tuple):
        one = quantized[0] if len(quantized) == 1 else None
        weight = None if one is None or one.order is not None else one.weight
    else:
        weight = getattr(quantized, "codes", None)
    return getattr(weight, "rounded", ""), getattr(weight, "input_scale", None)
