"""Quantize plain weights to the formats of bitsandbytes."""

from __future__ import annotations

import torch
from torch import Tensor

from modulm_quantized import Codes

__all__ = ["LEVELS", "round_to_int8", "round_to_levels"]

#: Values by code: nf4 has equal shares of a normal distribution (arXiv 2305.14314, appendix E); fp4
#: has two exponent bits and one mantissa bit, in twelfths.
LEVELS = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * twelfths / 12 for sign in (1, -1) for twelfths in (0, 0.0625, 8, 12, 4, 6, 2, 3)
    ),
}  # fmt: skip
#: Rows that are quantized at once, so that no fp32 copy of a large matrix exists.
_ROWS = 1024
_TINY = 1e-12


def round_to_levels(weight: Tensor, name: str, block: int) -> Codes:
    """Round weight [N, K] to the nearest of LEVELS[name], with a scale per `block` inputs."""
    levels = torch.tensor(LEVELS[name], device=weight.device)
    ranked, order = levels.sort()
    middles = (ranked[1:] + ranked[:-1]) / 2
    values = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(weight.shape[0], weight.shape[1] // block, device=weight.device)
    for start in range(0, weight.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        wide = weight[rows].float().unflatten(1, (-1, block))
        scales[rows] = wide.abs().amax(-1).clamp_(min=_TINY)
        nearest = torch.bucketize(wide / scales[rows][..., None], middles)
        values[rows] = order[nearest].flatten(1).to(torch.uint8)
    return Codes(values, scales, levels=levels)


def round_to_int8(weight: Tensor) -> Codes:
    """Round weight [N, K] to int8 with a scale per row."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, device=weight.device)
    for start in range(0, weight.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        wide = weight[rows].float()
        scales[rows] = (wide.abs().amax(-1, keepdim=True) / 127).clamp_(min=_TINY)
        values[rows] = (wide / scales[rows]).round_().to(torch.int8)
    return Codes(values, scales)
