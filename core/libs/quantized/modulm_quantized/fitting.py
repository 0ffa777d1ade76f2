"""Lossless conversion of codes to the kernels' formats."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm_quantized.codes import Codes
from modulm_quantized.scales import exponents, narrowest
from modulm_quantized.words import E2M1

__all__ = ["GROUPS", "Fitted", "for_kernels"]

#: Group sizes of the kernels' formats; one scale for all columns is separate. The smallest is not
#: available for 8-bit floats.
GROUPS = (16, 32, 64, 128, 256)
_LARGEST, _MIDDLE = 127, 128


@frozen(eq=False)
class Fitted:
    """Codes as the ops `pack_quantized` and `pack_quantized_experts` take them.

    form: the kernels' format name. group: columns that share a scale, 0 for all. values, scales,
    zeros: see those ops.
    """

    form: str
    group: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None


def for_kernels(codes: Codes, *, wide: bool = False) -> Fitted | None:
    """Convert codes to a kernel format; None if no format represents them exactly.

    wide: use the format that fits all weights stored this way, not the narrowest.
    """
    if codes.scales.shape[1] > 1 and codes.group not in GROUPS:
        fitting = [size for size in GROUPS if codes.group % size == 0]
        if not fitting:
            return None
        codes = codes.in_groups_of(fitting[-1])
    coded = _coded(codes, wide)
    if coded is None:
        return None
    form, fit = coded
    group = 0 if fit.scales.shape[1] == 1 else fit.group
    if form == "fp8" and group == GROUPS[0]:
        return None
    scales, zeros = fit.scales, fit.zeros
    if wide:
        return Fitted(form, group, fit.values, scales.float(), zeros)
    if zeros is None:
        return Fitted(form, group, fit.values, exponents(scales), None)
    centre = 8 if form == "int4" else 0  # offset that the kernels subtract from zero points
    return Fitted(form, group, fit.values, narrowest(scales, zeros.float() - centre), zeros)


def _coded(codes: Codes, wide: bool) -> tuple[str, Codes] | None:
    """Return the name of a format, and the codes in it."""
    if codes.levels is not None:
        if codes.values.dtype == torch.uint8 and torch.equal(codes.levels.cpu(), E2M1):
            return "e2m1", evolve(codes, scales=codes.scales.float() / 2, levels=None)
        whole = _whole_levels(codes)
        return None if whole is None else ("int8", whole)
    if codes.values.dtype == torch.float8_e4m3fn:
        return "fp8", codes
    if codes.values.dtype == torch.int8:
        zeros = torch.zeros_like(codes.scales) if wide and codes.zeros is None else codes.zeros
        return "int8", evolve(codes, zeros=zeros)
    if codes.values.dtype != torch.uint8:
        return None
    if not wide and int(codes.values.max()) < 16:
        zeros = torch.zeros_like(codes.scales) if codes.zeros is None else codes.zeros
        return "int4", evolve(codes, zeros=zeros)
    zeros = torch.full_like(codes.scales, -float(_MIDDLE), dtype=torch.float32)
    if codes.zeros is not None:
        zeros = codes.zeros.to(torch.float32) - _MIDDLE
    values = (codes.values ^ _MIDDLE).view(torch.int8)
    return "int8", evolve(codes, values=values, zeros=zeros)


def _whole_levels(codes: Codes) -> Codes | None:
    """Return codes whose levels, or twice the levels, are integers as 8-bit integers; else None."""
    if codes.levels is None:
        return codes
    for times in (1, 2):
        whole = codes.levels * times
        if bool((whole == whole.round()).all()) and float(whole.abs().max()) <= _LARGEST:
            values = whole.to(codes.values.device, torch.int8)[codes.values.int()]
            return evolve(codes, values=values, scales=codes.scales / times, levels=None)
    return None
