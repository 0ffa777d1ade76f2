"""Round-to-nearest quantization of plain weights, without calibration data.

Each function takes weight: [N, K] floating and gives (codes, scales, zeros) as `pack_linear` wants
them. Work is done in slices of rows, so that no fp32 copy of a large matrix is ever alive.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["quantize_fp8", "quantize_int4", "quantize_int8", "sliced"]

_ROWS = 1024
_FP8_MAX = 448.0
_TINY = 1e-12


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor, None]:
    """Symmetric, a scale per output: codes [N, K] int8 in -127..127, scales [N, 1] fp32."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], 1)
    for rows in sliced(weight.shape[0]):
        wide = weight[rows].float()
        scales[rows] = (wide.abs().amax(1, keepdim=True) / 127).clamp_(min=_TINY)
        codes[rows] = (wide / scales[rows]).round_().to(torch.int8)
    return codes, scales, None


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor, None]:
    """e4m3 with a scale per output: codes [N, K] float8_e4m3fn, scales [N, 1] fp32."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(weight.shape[0], 1)
    for rows in sliced(weight.shape[0]):
        wide = weight[rows].float()
        scales[rows] = (wide.abs().amax(1, keepdim=True) / _FP8_MAX).clamp_(min=_TINY)
        codes[rows] = (wide / scales[rows]).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return codes, scales, None


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric, per group along K: codes [N, K] uint8 in 0..15, scales and zeros [N, K/group].

    The range of a group is narrowed in steps and the one with the least squared error is kept:
    clipping a rare extreme costs less than coarser steps for the rest of the group.
    """
    size, inputs = weight.shape
    codes = torch.empty(size, inputs, dtype=torch.uint8)
    scales = torch.empty(size, inputs // group)
    zeros = torch.empty_like(scales)
    for rows in sliced(size):
        wide = weight[rows].float().unflatten(1, (-1, group))
        best = torch.full(wide.shape[:2], torch.inf)
        found = torch.empty(wide.shape, dtype=torch.uint8)
        low, high = wide.amin(-1).clamp_(max=0), wide.amax(-1).clamp_(min=0)
        for shrink in (1.0, 0.95, 0.9, 0.85, 0.8):
            scale = ((high - low) * (shrink / 15)).clamp_(min=_TINY)
            zero = (-low * shrink / scale).round_().clamp_(0, 15)
            code = (wide / scale[..., None] + zero[..., None]).round_().clamp_(0, 15)
            error = ((code - zero[..., None]) * scale[..., None] - wide).square_().sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            scales[rows] = torch.where(better, scale, scales[rows])
            zeros[rows] = torch.where(better, zero, zeros[rows])
            found = torch.where(better[..., None], code.to(torch.uint8), found)
        codes[rows] = found.flatten(1)
    return codes, scales, zeros


def sliced(rows: int) -> list[slice]:
    """[0, rows) in slices small enough for temporaries of a few megabytes."""
    return [slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS)]
