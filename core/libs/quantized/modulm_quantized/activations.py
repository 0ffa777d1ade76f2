"""Activations that are quantized on the fly, so that products run in low precision.

A layer's method names a format; `pack_quantized` and `pack_quantized_experts` take the name, and
the op `linear` or `fused_experts` quantizes its own inputs before the product. The functions here
are the reference: what a kernel's product must equal up to the rounding of its sums.

Sources: OCP Microscaling Formats (MX) Specification, version 1.0, sections 5 and 6.3; Micikevicius
et al., arXiv 2209.05433 (e4m3); NVIDIA, "Introducing NVFP4" (two levels of scales).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import field, frozen, validators
from torch import Tensor

from modulm_quantized.codes import Codes
from modulm_quantized.words import E2M1

__all__ = [
    "ACTIVATION_FORMATS",
    "ActivationFormat",
    "exact_product",
    "round_activations",
    "rounding_bound",
]

_FP8 = torch.float8_e4m3fn
_LARGEST = {"int8": 127.0, "e4m3": 448.0, "e2m1": 6.0}
#: Exponent of the largest power of two of a number format.
_TOP = {"e4m3": 8, "e2m1": 2}
#: Half the distance between two adjacent numbers, relative to the smaller one.
_HALF_STEP = {"e4m3": 2.0**-4, "e2m1": 2.0**-2}
#: Half the distance between two adjacent numbers below the smallest normal one.
_LEAST_STEP = {"e4m3": 2.0**-10, "e2m1": 0.25}
#: Midpoints between adjacent magnitudes of e2m1, and the codes that a tie rounds to (even).
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TINY = 1e-12


@frozen
class ActivationFormat:
    """How the rows of a product's input are quantized.

    numbers: "int8", "e4m3" or "e2m1". group: inputs that share a scale; 0 means a whole row (a
    token). scales: "float" (fp32), "power" (powers of two, rounded down as the specification does)
    or "e4m3" (times one fp32 number per token). weights: names of the kernels' weight formats that
    such activations are multiplied with. static: one scale for all tokens, from the checkpoint.
    """

    name: str
    numbers: str
    group: int
    scales: str = field(validator=validators.in_(("float", "power", "e4m3")))
    weights: tuple[str, ...]
    static: bool = False

    def __str__(self) -> str:
        if self.static:
            return f"{self.numbers}, the checkpoint's scale"
        kind = "an exponent" if self.scales == "power" else "a scale"
        where = f" and {self.group} inputs" if self.group else ""
        return f"{self.numbers}, {kind} per token{where}"


#: Names that methods return from `activations`, except "bf16" (not quantized).
ACTIVATION_FORMATS: Mapping[str, ActivationFormat] = {
    each.name: each
    for each in (
        ActivationFormat("int8", "int8", 256, "float", ("int8", "int4", "e2m1", "iq4")),
        ActivationFormat("fp8", "e4m3", 128, "float", ("fp8",)),
        ActivationFormat("fp8_token", "e4m3", 0, "float", ("fp8",)),
        ActivationFormat("fp8_static", "e4m3", 0, "float", ("fp8",), static=True),
        ActivationFormat("mxfp8", "e4m3", 32, "power", ("fp8", "e2m1")),
        ActivationFormat("mxfp4", "e2m1", 32, "power", ("e2m1",)),
        ActivationFormat("nvfp4", "e2m1", 16, "e4m3", ("e2m1",)),
    )
}


def round_activations(x: Tensor, name: str, scale: Tensor | None = None) -> Codes:
    """Quantize x [tokens, K] of any float dtype to a format.

    scale: the static scale, a scalar, for formats that have one. Numbers beyond the range of a
    format become its largest.
    """
    form = ACTIVATION_FORMATS[name]
    size = form.group or x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size))
    wide = torch.unflatten(padded, 1, (-1, size))
    largest = wide.abs().amax(-1)
    if form.static:
        if scale is None:
            raise ValueError(f"scale must be given for {name}")
        scales = scale.float().expand_as(largest).clone()
    elif form.scales == "power":
        exponents = torch.frexp(largest.clamp(min=2.0**-118))[1] - 1 - _TOP[form.numbers]
        scales = torch.exp2(exponents.float())
    elif form.scales == "e4m3":
        whole = largest.amax(1, keepdim=True).clamp(min=_TINY) / (6.0 * 448.0)
        scales = (largest / 6.0 / whole).clamp(2.0**-9, 448.0).to(_FP8).float() * whole
    else:
        scales = largest.clamp(min=_TINY) / _LARGEST[form.numbers]
    values = _rounded(wide / scales[..., None], form.numbers).flatten(1)
    levels = E2M1.to(x.device) if form.numbers == "e2m1" else None
    return Codes(values, scales, levels=levels)


def _rounded(ratio: Tensor, numbers: str) -> Tensor:
    """Return the nearest numbers of a format, ties to even: int8, e4m3, or codes of e2m1."""
    top = _LARGEST[numbers]
    ratio = ratio.clamp(-top, top)
    if numbers == "int8":
        return ratio.round().to(torch.int8)
    if numbers == "e4m3":
        return ratio.to(_FP8)
    size = ratio.abs()
    middles = torch.tensor(_MIDDLES, device=ratio.device)
    # A tie goes to the neighbour whose code is even: down after an even code, else up.
    down = torch.bucketize(size, middles)
    up = torch.bucketize(size, middles, right=True)
    code = torch.where(down % 2 == 0, down, up).to(torch.uint8)
    return code | (ratio.signbit().to(torch.uint8) << 3)


def exact_product(x: Codes, weight: Codes, inputs: int) -> Tensor:
    """Multiply activations and a weight [N, K] as they are stored: [tokens, N] fp64.

    Each product of two stored numbers with their scales is taken as an fp32 number; sums are exact
    to fp64. inputs: K; columns that `round_activations` has added are dropped.
    """
    left = x.weight(torch.float32)[:, :inputs].double()
    return left @ weight.weight(torch.float32).double().T


def rounding_bound(x: Tensor, name: str, scale: Tensor | None = None) -> Tensor:
    """Return how far each number of x [tokens, K] may be moved by quantizing it, from the format.

    Half a step: of the number itself, of the smallest normal number, or of integers; plus what lies
    beyond the largest number. Powers of two are rounded down, so that numbers up to twice the
    largest power are cut: e4m3 from 448 to 512, e2m1 from 6 to 8.
    """
    form = ACTIVATION_FORMATS[name]
    codes = round_activations(x, name, scale)
    size = codes.values.shape[1] // codes.scales.shape[1]
    scales = codes.scales.repeat_interleave(size, 1)[:, : x.shape[1]]
    ratio = x.float().abs() / scales
    over = (ratio - _LARGEST[form.numbers]).clamp(min=0.0)
    if form.numbers == "int8":
        return (over + 0.5) * scales
    step = torch.maximum(ratio * _HALF_STEP[form.numbers],
                         torch.tensor(_LEAST_STEP[form.numbers]))  # fmt: skip
    return torch.maximum(over, step) * scales * (1 + 2.0**-20)
