"""Convert stored scales to per-row and per-group scales."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from modulm.contracts.quantization import LinearSpec

__all__ = ["block_columns", "block_grid", "exponents", "narrowest", "per_row"]

#: The largest exponent plus 127 for which no value of a block exceeds fp32.
_LARGEST_EXPONENT = 251


def per_row(scale: Tensor, spec: LinearSpec) -> Tensor:
    """[parts] -> [N, 1]: repeat each fused part's scale for all its outputs."""
    sizes = torch.tensor(spec.parts, device=scale.device)
    return scale.repeat_interleave(sizes, 0)[:, None]


def block_grid(scale: Tensor, spec: LinearSpec, rows: int, columns: int) -> Tensor:
    """Entries of the axes `OUTPUTS.blocks(rows)`, `INPUTS.blocks(columns)` -> [N, groups].

    If the last block has fewer columns, the group size divides both.
    """
    tall = scale.repeat_interleave(spec.output_block(rows), 0)[: spec.outputs]
    step, size = spec.input_block(columns), block_columns(spec, columns)
    wide = tall.repeat_interleave(step // size, 1)
    return wide[:, : spec.inputs // size].contiguous()


def block_columns(spec: LinearSpec, columns: int) -> int:
    """Number of inputs that share a scale in `block_grid`."""
    return gcd(spec.input_block(columns), spec.inputs)


def narrowest(scale: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Return the scales in 16 bits, if that is exact for them and for `zeros`."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = scale.to(dtype)
        if torch.equal(narrow.to(scale.dtype), scale) and (
            zeros is None or torch.equal(zeros.to(dtype).to(zeros.dtype), zeros)
        ):
            return narrow
    return scale


def exponents(scale: Tensor) -> Tensor:
    """Return powers of two as exponents plus 127, if kernels support that; else `narrowest`."""
    mantissa, exponent = torch.frexp(scale.float())
    stored = exponent + 126
    if bool(((mantissa == 0.5) & (stored >= 1) & (stored <= _LARGEST_EXPONENT)).all()):
        return stored.to(torch.uint8)
    return narrowest(scale)
