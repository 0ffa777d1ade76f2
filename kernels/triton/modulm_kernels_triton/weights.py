"""Weights in the kernels' format: codes with scales, rows of one matrix or of many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm_kernels_triton.device import (
    SCALED,
    fp8_products,
    interpreting,
    scaled_products,
    target,
)
from modulm_kernels_triton.round_rows import RoundedRows

__all__ = ["FORMS", "GROUPS", "PackedCodes", "lay", "need", "stacked"]

#: Group sizes of inputs; 0 stands for all.
GROUPS = (0, 16, 32, 64, 128, 256)
#: What activations may be rounded to (`modulm_quantized.ACTIVATION_FORMATS`); "bf16": nothing.
ACTIVATIONS = (
    "bf16", "int8", "fp8", "fp8_token", "fp8_static", "mxfp8", "mxfp4", "nvfp4",
)  # fmt: skip
FORMS = {
    "int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8, "e2m1": torch.uint8,
    "iq4": torch.uint8,
}  # fmt: skip
#: Values of 4-bit codes: doubled e2m1 floats (OCP Microscaling Formats, version 1.0), and ggml's
#: IQ4 values.
_TABLES = {
    "int4": tuple(range(-8, 8)),
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
_LARGEST_EXPONENT = 251
#: Smallest group if activations are rounded: products process that many inputs.
_LEAST_ROUNDED = {"int8": 32, "fp8": 128}
_E4M3 = torch.float8_e4m3fn
#: Fewest rows of a tile that hardware multiplies in NVFP4.
_LEAST_NVFP4 = 128
#: Numbers of e4m3 with each of its mantissas, as large as they get.
_TOPS = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)


def need(holds: bool, message: str) -> None:
    """Raise ValueError with `message` unless `holds`."""
    if not holds:
        raise ValueError(message)


@frozen(eq=False)
class PackedCodes:
    """Rows [rows, K] of codes: scale * (number - zero), with a scale per `group` numbers.

    data: [rows, K] bytes, or [rows, ceil(K / 2)] for 4-bit codes. scales: [rows, groups] of a float
    dtype, or uint8, exponents of two plus 127; zeros: the same, or None. rounded: what activations
    are rounded to, "" for nothing. outputs: rows of one matrix. factors: [rows] fp32, for NVFP4,
    whose scales are then e4m3. input_scale: one fp32 number, the static scale of activations.
    """

    data: Tensor
    scales: Tensor
    zeros: Tensor | None
    table: Tensor
    form: str
    group: int
    inputs: int
    outputs: int
    rounded: str
    factors: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def groups(self) -> int:
        """Scales per row."""
        return self.scales.shape[1]

    @property
    def bytes(self) -> int:
        """Memory that a product with all rows reads."""
        tensors = (self.data, self.scales, self.zeros, self.factors)
        return sum(x.nbytes for x in tensors if x is not None)

    def rows(self, first: int, count: int) -> PackedCodes:
        """Return some of the rows."""
        some = slice(first, first + count)
        zeros = None if self.zeros is None else self.zeros[some]
        factors = None if self.factors is None else self.factors[some]
        return evolve(
            self, data=self.data[some], scales=self.scales[some], zeros=zeros, outputs=count,
            factors=factors,
        )  # fmt: skip

    def weight(self) -> Tensor:
        """Return the dequantized weight [rows, K] bf16."""
        if self.form in _TABLES:
            codes = torch.stack([self.data & 15, self.data >> 4], -1).flatten(1)
            wide = self.table.float()[codes[:, : self.inputs].int()]
        else:
            wide = self.data.float()
        grouped = wide.unflatten(1, (self.groups, -1))
        if self.zeros is not None:
            grouped = grouped - self.zeros.float()[..., None]
        scales = self.scales.float()
        if self.scales.dtype == torch.uint8:
            scales = torch.exp2(scales - 127)
        if self.factors is not None:  # of e2m1, which are doubled here
            scales = scales * (self.factors[:, None] / 2)
        return (grouped * scales[..., None]).flatten(1).bfloat16()

    def unrounded(self) -> PackedCodes:
        """Return the same weight for activations that are not rounded."""
        if self.factors is None:
            return evolve(self, rounded="", input_scale=None)
        scales = self.scales.float() * (self.factors[:, None] / 2)
        return evolve(self, rounded="", scales=scales, factors=None)

    def meta(self, rows: int) -> dict[str, Any]:
        """Return the constants of a kernel that reads it, with so many rows of inputs in a tile."""
        return {
            "FORM": self.form,
            "ROUNDED": self._variant(rows),
            "SCALED": self.rounded in SCALED,
            "GROUP": self.group,
            "EXPONENTS": self.scales.dtype == torch.uint8,
            "ZEROS": self.zeros is not None,
            "BK": self.block,
        }

    def _variant(self, rows: int) -> str:
        """Return the name of the kernel's product."""
        if self.rounded in SCALED:
            # For NVIDIA, Triton converts MX formats where hardware or tiles do not fit, not NVFP4.
            fits = scaled_products(self.rounded)
            if self.rounded == "nvfp4":
                fits = fits and rows >= _LEAST_NVFP4
            elif target()[0] == "cuda":
                fits = True
            return self.rounded if fits and not interpreting() else f"{self.rounded}_emulated"
        return "fp8_token" if self.rounded == "fp8_static" else self.rounded

    def tensors(self, rows: RoundedRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return codes, scales, zero points and table as `product` takes them, for these inputs."""
        if self.rounded in SCALED:
            data, scales = self.data.view(torch.uint8), self.scales.view(torch.uint8)
            factors = rows.factors if rows.factors is not None else scales
            return data, scales, scales if self.factors is None else self.factors, factors
        data = self.data
        if self.form == "fp8" and not self.rounded:
            data = data.view(torch.uint8)
        return data, self.scales, self.scales if self.zeros is None else self.zeros, self.table

    @property
    def block(self) -> int:
        """Inputs that are multiplied at a time."""
        if self.rounded in SCALED:
            return 128
        if self.rounded and self.group:
            return min(self.group, 128)
        return 128 if self.group in (0, 128, 256) else 64


def lay(
    codes: Tensor,
    form: str,
    group: int,
    scales: Tensor | None,
    zeros: Tensor | None,
    activations: str,
    input_scale: Tensor | None = None,
) -> PackedCodes:
    """Pack one matrix [N, K] of codes; arguments as in the op `pack_quantized`."""
    need(form in FORMS, f"format must be one of {', '.join(FORMS)}, not {form!r}")
    need(codes.dim() == 2, f"weight must be [N, K], not {list(codes.shape)}")
    need(group in GROUPS, f"group must be one of {GROUPS}, not {group}")
    need(
        activations in ACTIVATIONS,
        f"activations must be one of {', '.join(ACTIVATIONS)}, not {activations!r}",
    )
    outputs, inputs = codes.shape
    need(codes.dtype == FORMS[form], f"weight must be {FORMS[form]} for {form}, not {codes.dtype}")
    need(group == 0 or inputs % group == 0, f"group {group} must divide weight's K {inputs}")
    need(zeros is None or form in ("int8", "int4"), f"zeros must be None for {form}")
    if scales is None:
        raise ValueError(f"scales must be given for {form}")
    scales = scales[:, None] if scales.dim() == 1 else scales
    wanted = [outputs, inputs // group if group else 1]
    need(list(scales.shape) == wanted, f"scales must be {wanted}, not {list(scales.shape)}")
    need(scales.dtype in _SCALES, f"scales must be of {_SCALES}, not {scales.dtype}")
    if scales.dtype == torch.uint8:
        most = int(scales.max())
        need(most <= _LARGEST_EXPONENT, f"scales must lie below 2^125, not at 2^{most - 127}")
    if zeros is not None:
        zeros = zeros.view(scales.shape).float() - (8 if form == "int4" else 0)
    table = torch.tensor(_TABLES.get(form, (0,)), dtype=torch.int8, device=codes.device)
    rounded, factors = _rounded(form, group, activations, scales), None
    if rounded == "nvfp4":
        nested = _nested(scales)
        if nested is None:
            rounded = ""
        else:
            scales, factors = nested
    if rounded == "fp8_static":
        need(input_scale is not None, "input_scale must be given for fp8_static")
    return PackedCodes(
        _stored(codes, form), scales.contiguous(), zeros, table, form, group, inputs, outputs,
        rounded, factors, input_scale if rounded == "fp8_static" else None,
    )  # fmt: skip


def _stored(codes: Tensor, form: str) -> Tensor:
    if form not in _TABLES:
        return codes.detach().contiguous()
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous()


def _rounded(form: str, group: int, activations: str, scales: Tensor) -> str:
    """Return what activations are rounded to: as requested, or nothing if no kernel fits."""
    powers = scales.dtype == torch.uint8
    if activations in SCALED:
        nested = activations == "nvfp4"
        forms = ("fp8", "e2m1") if activations == "mxfp8" else ("e2m1",)
        fits = form in forms and group == (16 if nested else 32) and powers != nested
        return activations if fits else ""
    if activations.startswith("fp8"):
        fits = form == "fp8" and fp8_products()
    else:
        fits = activations == "int8" and form != "fp8"
    if not fits or 0 < group < _LEAST_ROUNDED[activations.partition("_")[0]]:
        return ""
    return activations


def _nested(scales: Tensor) -> tuple[Tensor, Tensor] | None:
    """Split scales [N, groups] of doubled e2m1 numbers into e4m3 and a factor per row [N] fp32.

    They are products of an e4m3 number and an unknown factor. A row's largest scale has one of
    eight mantissas, and the others tell which. None if none fits.
    """
    wide = 2.0 * scales.float()
    largest = wide.amax(1).clamp(min=1e-30)
    factors, found = torch.ones_like(largest), torch.zeros_like(largest, dtype=torch.bool)
    best = torch.zeros_like(scales, dtype=_E4M3)
    for top in _TOPS:
        factor = largest / top
        nested = (wide / factor[:, None]).to(_E4M3)
        exact = ((nested.float() * factor[:, None] - wide).abs() <= 2.0**-21 * wide).all(1)
        new = exact & ~found
        factors = torch.where(new, factor, factors)
        best = torch.where(new[:, None], nested.float(), best.float()).to(_E4M3)
        found |= exact
        if bool(found.all()):
            break
    return (best, factors) if bool(found.all()) else None


def stacked(parts: Iterable[PackedCodes]) -> PackedCodes:
    """Concatenate matrices of the same format."""
    matrices = list(parts)
    first = matrices[0]
    zeros = None
    if any(part.zeros is not None for part in matrices):
        zeros = torch.cat([
            torch.zeros_like(part.scales, dtype=torch.float32) if part.zeros is None else part.zeros
            for part in matrices
        ])  # fmt: skip
    data, scales = (
        torch.cat([getattr(part, name) for part in matrices]) for name in ("data", "scales")
    )
    factors = [part.factors for part in matrices if part.factors is not None]
    return evolve(
        first, data=data, scales=scales, zeros=zeros,
        factors=torch.cat(factors) if factors else None,
    )  # fmt: skip
