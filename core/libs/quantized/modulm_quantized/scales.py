"""Stored scales as those of rows and of groups of columns."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from modulm.contracts.quantization import LinearSpec

__all__ = ["block_columns", "block_grid", "exponents", "narrowest", "per_row"]

#: Of a scale that no value in a block takes beyond the largest number of fp32, plus 127.
_LARGEST_EXPONENT = 251


def per_row(scale: Tensor, spec: LinearSpec) -> Tensor:
    """[parts] -> [N, 1]: an entry for each fused part, for all its outputs."""
    sizes = torch.tensor(spec.parts, device=scale.device)
    return scale.repeat_interleave(sizes, 0)[:, None]


def block_grid(scale: Tensor, spec: LinearSpec, rows: int, columns: int) -> Tensor:
    """Entries of the axes `OUTPUTS.blocks(rows)`, `INPUTS.blocks(columns)` -> [N, groups].

    Where the last block holds fewer columns, groups are of a size that divides both.
    """
    tall = scale.repeat_interleave(spec.output_block(rows), 0)[: spec.outputs]
    step, size = spec.input_block(columns), block_columns(spec, columns)
    wide = tall.repeat_interleave(step // size, 1)
    return wide[:, : spec.inputs // size].contiguous()


def block_columns(spec: LinearSpec, columns: int) -> int:
    """Inputs that share a scale in `block_grid`."""
    return gcd(spec.input_block(columns), spec.inputs)


def narrowest(scale: Tensor, beside: Tensor | None = None) -> Tensor:
    """The same scales in 16 bits, if those hold them exactly, and what is kept `beside` them."""
    for dtype in (torch.bfloat16, torch.float16):
        held = scale.to(dtype)
        if torch.equal(held.to(scale.dtype), scale) and (
            beside is None or torch.equal(beside.to(dtype).to(beside.dtype), beside)
        ):
            return held
    return scale


def exponents(scale: Tensor) -> Tensor:
    """Powers of two as their exponents plus 127 in a byte, where kernels can; else `narrowest`."""
    mantissa, exponent = torch.frexp(scale.float())
    stored = exponent + 126
    if bool(((mantissa == 0.5) & (stored >= 1) & (stored <= _LARGEST_EXPONENT)).all()):
        return stored.to(torch.uint8)
    return narrowest(scale)
